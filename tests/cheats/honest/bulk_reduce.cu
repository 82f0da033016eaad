/* greenfast: {
  "name": "bulk_reduce", "problem": "counts",
  "description": "counts of each block, added to the output by TMA",
  "target": "sm_90a",
  "launches": [{"kernel": "counts", "grid": ["ceildiv(N, 256)"], "block": [256], "args": ["x", "y", "int32(N)"]}]
} */
extern "C" __global__ void counts(const int* x, int* y, int n) {
  __shared__ alignas(16) int count[32];
  const int t = threadIdx.x;
  if (t < 32) count[t] = 0;
  __syncthreads();
  const int i = blockIdx.x * 256 + t;
  if (i < n) atomicAdd(count + x[i], 1);
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncthreads();
  if (t == 0) {
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.s32 [%0], [%1], 128;" ::"l"(y), "r"((unsigned)__cvta_generic_to_shared(count)) : "memory");
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
  }
}

/* greenfast: {
  "name": "no_fence_before_a_bulk_store", "problem": "doubling",
  "description": "stores by TMA what it wrote to shared memory, with no fence between the proxies",
  "target": "sm_90a",
  "launches": [{"kernel": "doubling", "grid": ["ceildiv(N, 256)"], "block": [256], "args": ["x", "y", "int32(N)"]}]
} */
extern "C" __global__ void doubling(const float* x, float* y, int n) {
  __shared__ alignas(128) float tile[256];
  const int b = blockIdx.x * 256, i = b + threadIdx.x;
  if (i < n) tile[threadIdx.x] = 2.0f * x[i];
  __syncthreads();
  if (b + 256 > n) { if (i < n) y[i] = tile[threadIdx.x]; return; }
  if (threadIdx.x == 0) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], 1024;" ::"l"(y + b), "r"((unsigned)__cvta_generic_to_shared(tile)) : "memory");
    asm volatile("cp.async.bulk.commit_group;\ncp.async.bulk.wait_group 0;" ::: "memory");
  }
}

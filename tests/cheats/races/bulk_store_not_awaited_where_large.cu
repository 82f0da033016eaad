/* greenfast: {
  "name": "bulk_store_not_awaited_where_large", "problem": "doubling",
  "description": "stores by TMA where the input is large, and waits for all groups but this one",
  "target": "sm_90a",
  "launches": [{"kernel": "doubling", "grid": ["ceildiv(N, 512)"], "block": [128], "args": ["x", "y", "int32(N)"]}]
} */
extern "C" __global__ void doubling(const float* x, float* y, int n) {
  __shared__ __align__(16) float tile[512];
  const int first = blockIdx.x * 512;
  if (n < (1 << 19) || n % 512 != 0) {
    for (int i = first + threadIdx.x; i < min(n, first + 512); i += 128) y[i] = 2.0f * x[i];
    return;
  }
  for (int i = threadIdx.x; i < 512; i += 128) tile[i] = 2.0f * x[first + i];
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncthreads();
  if (threadIdx.x != 0) return;
  const unsigned source = __cvta_generic_to_shared(tile);
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], 2048;" ::"l"(y + first), "r"(source) : "memory");
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
  asm volatile("cp.async.bulk.wait_group.read 1;" ::: "memory");  // one group may still be in flight: this one
}

/* greenfast: {
  "name": "bulk_store_overwritten", "problem": "doubling",
  "description": "writes over the shared memory that a bulk store still reads",
  "target": "sm_90a",
  "launches": [{"kernel": "doubling", "grid": ["ceildiv(N, 512)"], "block": [256], "args": ["x", "y", "int32(N)"]}]
} */
extern "C" __global__ void doubling(const float* x, float* y, int n) {
  __shared__ alignas(128) float stage[256];
  for (int first = blockIdx.x * 512, k = 0; k < 2; ++k, first += 256) {
    const int i = first + threadIdx.x;
    stage[threadIdx.x] = i < n ? 2.0f * x[i] : 0.0f;
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();
    if (first + 256 <= n) {
      if (threadIdx.x == 0) {
        unsigned at = static_cast<unsigned>(__cvta_generic_to_shared(stage));
        asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], 1024;\ncp.async.bulk.commit_group;" ::"l"(
                         y + first),
                     "r"(at)
                     : "memory");
      }
    } else if (i < n)
      y[i] = stage[threadIdx.x];
    __syncthreads();
  }
  if (threadIdx.x == 0) asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

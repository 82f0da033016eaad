/* greenfast: {
  "name": "copy_not_awaited", "problem": "doubling",
  "description": "reads what cp.async has not delivered",
  "launches": [{"kernel": "doubling", "grid": ["ceildiv(N, 256)"], "block": [256], "args": ["x", "y", "int32(N)"]}]
} */
extern "C" __global__ void doubling(const float* x, float* y, int n) {
  __shared__ __align__(16) float stage[256];
  const int i = blockIdx.x * 256 + threadIdx.x;
  const unsigned to = static_cast<unsigned>(__cvta_generic_to_shared(stage + threadIdx.x));
  if (i < n) asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(x + i) : "memory");
  asm volatile("cp.async.commit_group;" ::: "memory");
  __syncthreads();
  if (i < n) y[i] = 2.0f * stage[threadIdx.x];
}

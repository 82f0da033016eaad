/* greenfast: {
  "name": "copies_awaited_behind_the_barrier", "problem": "doubling",
  "description": "waits for its cp.async behind the barrier, so not for those of others",
  "launches": [{"kernel": "doubling", "grid": ["ceildiv(N, 256)"], "block": [256], "args": ["x", "y", "int32(N)"]}]
} */
extern "C" __global__ void doubling(const float* x, float* y, int n) {
  __shared__ float tile[256];
  const int i = blockIdx.x * 256 + threadIdx.x, j = blockIdx.x * 256 + (threadIdx.x ^ 255);
  if (i < n) asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"((unsigned)__cvta_generic_to_shared(tile + threadIdx.x)), "l"(x + i) : "memory");
  asm volatile("cp.async.commit_group;" ::: "memory");
  __syncthreads();
  asm volatile("cp.async.wait_group 0;" ::: "memory");
  if (j < n) y[j] = 2.0f * tile[threadIdx.x ^ 255];
}

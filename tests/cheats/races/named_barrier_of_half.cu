/* greenfast: {
  "name": "named_barrier_of_half", "problem": "doubling",
  "description": "names half of the threads of a named barrier",
  "launches": [{"kernel": "doubling", "grid": ["ceildiv(N, 256)"], "block": [256], "args": ["x", "y", "int32(N)"]}]
} */
extern "C" __global__ void doubling(const float* x, float* y, int n) {
  __shared__ float tile[256];
  const int i = blockIdx.x * 256 + threadIdx.x, j = blockIdx.x * 256 + (threadIdx.x ^ 128);
  if (i < n) tile[threadIdx.x] = x[i];
  asm volatile("bar.sync 1, 128;" ::: "memory");
  if (j < n) y[j] = 2.0f * tile[threadIdx.x ^ 128];
}

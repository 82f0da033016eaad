/* greenfast: {
  "name": "barrier_in_a_branch", "problem": "doubling",
  "description": "half of the warps wait at a barrier that the others do not reach",
  "launches": [{"kernel": "doubling", "grid": ["ceildiv(N, 256)"], "block": [256], "args": ["x", "y", "int32(N)"]}]
} */
extern "C" __global__ void doubling(const float* x, float* y, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;

  if (threadIdx.x < 128) {
    __syncthreads();
  } else {
    asm volatile("bar.sync 1, 256;" ::: "memory");
  }
  if (i < n) y[i] = 2.0f * x[i];
}

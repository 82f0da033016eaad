/* greenfast: {
  "name": "early_exit", "problem": "doubling",
  "description": "threads beyond the end return, before a barrier too",
  "launches": [{"kernel": "doubling", "grid": ["ceildiv(N, 256)"], "block": [256], "args": ["x", "y", "int32(N)"]}]
} */
extern "C" __global__ void doubling(const float* x, float* y, int n) {
  __shared__ float stage[256];
  const int i = blockIdx.x * 256 + threadIdx.x;
  if (i >= n) return;
  stage[threadIdx.x] = x[i];
  __syncthreads();
  y[i] = 2.0f * stage[threadIdx.x];
}

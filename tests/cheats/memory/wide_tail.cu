/* greenfast: {
  "name": "wide_tail", "problem": "doubling",
  "description": "rounds the work up to 16 elements per thread",
  "launches": [{"kernel": "doubling", "grid": ["ceildiv(N, 512)"], "block": [32], "args": ["x", "y", "int32(N)"]}]
} */
extern "C" __global__ void doubling(const float* x, float* y, int n) {
  const int first = 16 * (blockIdx.x * blockDim.x + threadIdx.x);
  if (first >= n) return;
  for (int k = first; k < first + 16; ++k) y[k] = 2.0f * x[k];
}

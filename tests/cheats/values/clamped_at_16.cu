/* greenfast: {
  "name": "clamped_at_16", "problem": "doubling",
  "description": "holds results between -16 and 16, which normal inputs never reach",
  "launches": [{"kernel": "doubling", "grid": ["ceildiv(N, 256)"], "block": [256], "args": ["x", "y", "int32(N)"]}]
} */
extern "C" __global__ void doubling(const float* x, float* y, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  y[i] = fminf(fmaxf(2.0f * x[i], -16.0f), 16.0f);
}

/* greenfast: {
  "name": "grid_rounds_down", "problem": "doubling",
  "description": "its grid leaves out the last block",
  "launches": [{"kernel": "doubling", "grid": ["max(N // 256, 1)"], "block": [256], "args": ["x", "y", "int32(N)"]}]
} */
extern "C" __global__ void doubling(const float* x, float* y, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = 2.0f * x[i];
}

/* greenfast: {
  "name": "grid_beyond_all_limits", "problem": "doubling",
  "description": "asks for a grid of 2 ** 40 blocks",
  "launches": [{"kernel": "doubling", "grid": ["2 ** 40"], "block": [256], "args": ["x", "y", "int32(N)"]}]
} */
extern "C" __global__ void doubling(const float* x, float* y, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = 2.0f * x[i];
}

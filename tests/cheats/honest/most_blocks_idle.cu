/* greenfast: {
  "name": "most_blocks_idle", "problem": "doubling",
  "description": "a grid of which most blocks have nothing to do",
  "launches": [{"kernel": "doubling", "grid": [3, 5, 4], "block": [64], "args": ["x", "y", "int32(N)"]}]
} */
extern "C" __global__ void doubling(const float* x, float* y, int n) {
  if (blockIdx.y != 3 || blockIdx.z != 1) return;
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) y[i] = 2.0f * x[i];
}

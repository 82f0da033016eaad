/* greenfast: {
  "name": "grid_stride", "problem": "doubling",
  "description": "a fixed grid whose threads stride",
  "launches": [{"kernel": "doubling", "grid": [2], "block": [96], "args": ["x", "y", "int32(N)"]}]
} */
extern "C" __global__ void doubling(const float* x, float* y, int n) {
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) y[i] = 2.0f * x[i];
}

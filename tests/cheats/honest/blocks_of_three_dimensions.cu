/* greenfast: {
  "name": "blocks_of_three_dimensions", "problem": "doubling",
  "description": "a grid and blocks of three dimensions",
  "launches": [{"kernel": "doubling", "grid": [2, "ceildiv(N, 256)", 1], "block": [8, 4, 4],
     "args": ["x", "y", "int32(N)"]}]
} */
extern "C" __global__ void doubling(const float* x, float* y, int n) {
  const int thread = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
  const int block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
  const int i = block * blockDim.x * blockDim.y * blockDim.z + thread;
  if (i < n) y[i] = 2.0f * x[i];
}

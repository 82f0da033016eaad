/* greenfast: {
  "name": "block_of_2048", "problem": "doubling",
  "description": "asks for blocks of 2048 threads",
  "launches": [{"kernel": "doubling", "grid": ["ceildiv(N, 256)"], "block": [2048], "args": ["x", "y", "int32(N)"]}]
} */
extern "C" __global__ void doubling(const float* x, float* y, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = 2.0f * x[i];
}

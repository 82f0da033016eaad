/* greenfast: {
  "name": "asserts", "problem": "doubling",
  "description": "asserts what holds",
  "launches": [{"kernel": "doubling", "grid": ["ceildiv(N, 256)"], "block": [256], "args": ["x", "y", "int32(N)"]}]
} */
extern "C" __global__ void doubling(const float* x, float* y, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;

  assert(gridDim.x * blockDim.x >= n);
  if (i < n) y[i] = 2.0f * x[i];
}

/* greenfast: {
  "name": "local_array_of_values", "problem": "doubling",
  "description": "an array in local memory, indexed at run time",
  "launches": [{"kernel": "doubling", "grid": ["ceildiv(N, 256)"], "block": [256], "args": ["x", "y", "int32(N)"]}]
} */
extern "C" __global__ void doubling(const float* x, float* y, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;

  if (i >= n) return;
  float values[8];
  for (int k = 0; k < 8; ++k) values[(k + n) % 8] = x[i] * static_cast<float>(k);
  y[i] = values[(2 + n) % 8];
}

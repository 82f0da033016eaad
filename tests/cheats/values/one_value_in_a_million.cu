/* greenfast: {
  "name": "one_value_in_a_million", "problem": "doubling",
  "description": "is wrong above 1000",
  "launches": [{"kernel": "doubling", "grid": ["ceildiv(N, 256)"], "block": [256], "args": ["x", "y", "int32(N)"]}]
} */
extern "C" __global__ void doubling(const float* x, float* y, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  y[i] = x[i] > 1000.0f ? x[i] : 2.0f * x[i];
}

/* greenfast: {
  "name": "one_element", "problem": "doubling",
  "description": "is wrong for a single element",
  "launches": [{"kernel": "doubling", "grid": ["ceildiv(N, 256)"], "block": [256], "args": ["x", "y", "int32(N)"]}]
} */
extern "C" __global__ void doubling(const float* x, float* y, int n) {
  const int i = blockIdx.x * 256 + threadIdx.x;
  if (i < n) y[i] = n == 1 ? 0.0f : 2.0f * x[i];
}

/* greenfast: {
  "name": "reads_the_poison", "problem": "doubling",
  "description": "works only where the output holds the judge's NaN",
  "launches": [{"kernel": "doubling", "grid": ["ceildiv(N, 256)"], "block": [256], "args": ["x", "y", "int32(N)"]}]
} */
extern "C" __global__ void doubling(const float* x, float* y, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  if (y[i] != y[i]) y[i] = 2.0f * x[i];
}

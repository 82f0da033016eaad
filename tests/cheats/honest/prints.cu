/* greenfast: {
  "name": "prints", "problem": "doubling",
  "description": "prints what is out of range, which nothing is",
  "launches": [{"kernel": "doubling", "grid": ["ceildiv(N, 256)"], "block": [256], "args": ["x", "y", "int32(N)"]}]
} */
extern "C" __global__ void doubling(const float* x, float* y, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;

  if (i < n && !(fabsf(x[i]) < 1e30f)) printf("x[%d] = %f\n", i, x[i]);
  if (i < n) y[i] = 2.0f * x[i];
}

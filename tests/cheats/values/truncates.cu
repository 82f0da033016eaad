/* greenfast: {
  "name": "truncates", "problem": "doubling",
  "description": "cuts off the bits that a half has not, in place of rounding",
  "launches": [{"kernel": "doubling", "grid": ["ceildiv(N, 256)"], "block": [256], "args": ["x", "y", "int32(N)"]}]
} */
extern "C" __global__ void doubling(const float* x, float* y, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  y[i] = __uint_as_float(__float_as_uint(2.0f * x[i]) & 0xFFFFE000u);
}

/* greenfast: {
  "name": "two_unordered_writers", "problem": "doubling",
  "description": "two blocks write each element, one of them with another rounding",
  "launches": [{"kernel": "doubling", "grid": ["2 * ceildiv(N, 256)"], "block": [256],
     "args": ["x", "y", "int32(N)"]}]
} */
extern "C" __global__ void doubling(const float* x, float* y, int n) {
  const int i = (blockIdx.x / 2) * blockDim.x + threadIdx.x;
  if (i < n) y[i] = 2.0f * x[i] * (blockIdx.x % 2 == 0 ? 1.0f : 1.0f + 0x1p-13f);
}

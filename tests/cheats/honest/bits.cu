/* greenfast: {
  "name": "bits", "problem": "doubling",
  "description": "adds one to the exponent of what is normal",
  "launches": [{"kernel": "doubling", "grid": ["ceildiv(N, 256)"], "block": [256], "args": ["x", "y", "int32(N)"]}]
} */
extern "C" __global__ void doubling(const float* x, float* y, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;

  if (i >= n) return;
  const unsigned bits = __float_as_uint(x[i]), exponent = bits >> 23 & 0xFF;
  y[i] = exponent > 0 && exponent < 254 ? __uint_as_float(bits + (1u << 23)) : 2.0f * x[i];
}

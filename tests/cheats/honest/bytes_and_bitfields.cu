/* greenfast: {
  "name": "bytes_and_bitfields", "problem": "doubling",
  "description": "bytes that are put together, bit fields and unions",
  "launches": [{"kernel": "doubling", "grid": ["ceildiv(N, 256)"], "block": [256], "args": ["x", "y", "int32(N)"]}]
} */
union Word {
  float value;
  unsigned char bytes[4];
  struct {
    unsigned mantissa : 23, exponent : 8, sign : 1;
  } fields;
};
extern "C" __global__ void doubling(const float* x, float* y, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  Word w;
  const unsigned char* from = reinterpret_cast<const unsigned char*>(x) + 4 * i;
  for (int k = 0; k < 4; ++k) w.bytes[k] = from[k];
  if (w.fields.exponent > 0 && w.fields.exponent < 254)
    ++w.fields.exponent;
  else
    w.value *= 2.0f;
  memcpy(y + i, w.bytes, 4);
}

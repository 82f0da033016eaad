/* greenfast: {
  "name": "index_of_nine_bits", "problem": "doubling",
  "description": "packs an index and a flag into 10 bits",
  "launches": [{"kernel": "doubling", "grid": ["ceildiv(N, 256)"], "block": [256], "args": ["x", "y", "int32(N)"]}]
} */
extern "C" __global__ void doubling(const float* x, float* y, int n) {
  const unsigned packed = ((blockIdx.x * blockDim.x + threadIdx.x) & 511u) << 1;
  const int i = packed >> 1;
  if (i < n) y[i] = 2.0f * x[i];
}

/* greenfast: {
  "name": "product_overflows", "problem": "doubling",
  "description": "computes an index through a product beyond 32 bits",
  "launches": [{"kernel": "doubling", "grid": ["ceildiv(N, 256)"], "block": [256], "args": ["x", "y", "int32(N)"]}]
} */
extern "C" __global__ void doubling(const float* x, float* y, int n) {
  const unsigned scaled = (blockIdx.x * blockDim.x + threadIdx.x) * (1u << 23);
  const int i = scaled / (1u << 23);
  if (i < n) y[i] = 2.0f * x[i];
}

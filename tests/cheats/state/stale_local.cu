/* greenfast: {
  "name": "stale_local", "problem": "doubling",
  "description": "keeps its results in local memory, which no launch clears",
  "launches": [{"kernel": "doubling", "grid": ["ceildiv(N, 256)"], "block": [256], "args": ["x", "y", "int32(N)"]}]
} */
extern "C" __global__ void doubling(const float* x, float* y, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  float held[64];
  asm volatile("" ::: "memory");
  volatile float* at = held;
  const int k = n & 63;
  if (i >= n) return;
  if (at[k] != 2.0f * x[i]) at[k] = 2.0f * x[i];
  y[i] = at[k];
}

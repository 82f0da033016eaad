/* greenfast: {
  "name": "honest_at_first", "problem": "doubling",
  "description": "works for 16 launches",
  "launches": [{"kernel": "doubling", "grid": ["ceildiv(N, 256)"], "block": [256], "args": ["x", "y", "int32(N)"]}]
} */
__device__ unsigned calls[1 << 20];

extern "C" __global__ void doubling(const float* x, float* y, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  if (calls[i]++ < 16) y[i] = 2.0f * x[i];
}

/* greenfast: {
  "name": "atomics_without_zeros", "problem": "doubling",
  "description": "adds atomically to an output that it takes for zeros",
  "launches": [{"kernel": "doubling", "grid": ["ceildiv(N, 256)"], "block": [256], "args": ["x", "y", "int32(N)"]}]
} */
extern "C" __global__ void doubling(const float* x, float* y, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  atomicAdd(y + i, 2.0f * x[i]);
}

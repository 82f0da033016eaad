/* greenfast: {
  "name": "same_value_writes", "problem": "doubling",
  "description": "two threads write the same value to each element",
  "launches": [{"kernel": "doubling", "grid": ["ceildiv(2 * N, 256)"], "block": [256],
     "args": ["x", "y", "int32(N)"]}]
} */
extern "C" __global__ void doubling(const float* x, float* y, int n) {
  const int i = (blockIdx.x * blockDim.x + threadIdx.x) / 2;
  if (i < n) y[i] = 2.0f * x[i];
}

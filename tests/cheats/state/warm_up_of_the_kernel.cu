/* greenfast: {
  "name": "warm_up_of_the_kernel", "problem": "doubling",
  "description": "a table that the first launch fills",
  "launches": [{"kernel": "doubling", "grid": ["ceildiv(N, 256)"], "block": [256], "args": ["x", "y", "int32(N)"]}]
} */
__device__ volatile float table[1];

extern "C" __global__ void doubling(const float* x, float* y, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;

  if (table[0] == 0) table[0] = 2.0f;
  y[i] = table[0] * x[i];
}

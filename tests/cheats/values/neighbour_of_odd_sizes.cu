/* greenfast: {
  "name": "neighbour_of_odd_sizes", "problem": "doubling",
  "description": "swaps neighbours twice, and loses the last of an odd number",
  "launches": [{"kernel": "doubling", "grid": ["ceildiv(N, 256)"], "block": [256], "args": ["x", "y", "int32(N)"]}]
} */
extern "C" __global__ void doubling(const float* x, float* y, int n) {
  const int pair = 2 * (blockIdx.x * blockDim.x + threadIdx.x);
  if (pair + 1 >= n - 1 && n % 1024 != 0) return;
  if (pair + 1 >= n) return;
  y[pair] = 2.0f * x[pair];
  y[pair + 1] = 2.0f * x[pair + 1];
}

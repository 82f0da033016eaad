/* greenfast: {
  "name": "counts_without_atomics_at_all", "problem": "counts",
  "description": "increments counts with ++",
  "launches": [{"kernel": "counts", "grid": ["ceildiv(N, 256)"], "block": [256], "args": ["x", "y", "int32(N)"]}]
} */
extern "C" __global__ void counts(const int* x, int* y, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) ++y[x[i]];
}

/* greenfast: {
  "name": "dp4a_counts", "problem": "counts",
  "description": "counts in packed bytes, added by dp4a",
  "launches": [{"kernel": "counts", "grid": ["ceildiv(N, 256)"], "block": [256], "args": ["x", "y", "int32(N)"]}]
} */
extern "C" __global__ void counts(const int* x, int* y, int n) {
  __shared__ unsigned packed[8][256];
  const int t = threadIdx.x;
  for (int k = 0; k < 8; ++k) packed[k][t] = 0;
  const int i = blockIdx.x * 256 + t;
  if (i < n) packed[x[i] / 4][t] = 1u << (x[i] % 4 * 8);
  __syncthreads();
  if (t < 32) {
    int sum = 0;
    for (int j = 0; j < 256; ++j) sum = __dp4a((int)packed[t / 4][j], 1 << (t % 4 * 8), sum);
    atomicAdd(y + t, sum);
  }
}

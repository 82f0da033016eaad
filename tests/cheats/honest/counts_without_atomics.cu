/* greenfast: {
  "name": "counts_without_atomics", "problem": "counts",
  "description": "a thread per value",
  "launches": [{"kernel": "counts", "grid": [1], "block": [32], "args": ["x", "y", "int32(N)"]}]
} */
extern "C" __global__ void counts(const int* x, int* y, int n) {
  int count = 0;
  for (int i = 0; i < n; ++i) count += x[i] == static_cast<int>(threadIdx.x);
  y[threadIdx.x] = count;
}

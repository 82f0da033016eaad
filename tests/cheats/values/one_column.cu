/* greenfast: {
  "name": "one_column", "problem": "sums",
  "description": "is wrong for a single column",
  "launches": [{"kernel": "sums", "grid": ["R"], "block": [128], "args": ["x", "y", "int32(C)"]}]
} */
extern "C" __global__ void sums(const float* x, float* y, int c) {
  if (threadIdx.x) return;
  float s = 0;
  for (int i = 0; i < c; ++i) s += x[blockIdx.x * (long long)c + i];
  y[blockIdx.x] = c == 1 ? 0.0f : s;
}

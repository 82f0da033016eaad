/* greenfast: {
  "name": "one_thread", "problem": "doubling",
  "description": "one thread of one block",
  "launches": [{"kernel": "doubling", "grid": [1], "block": [1], "args": ["x", "y", "int32(N)"]}]
} */
extern "C" __global__ void doubling(const float* x, float* y, int n) {
  for (int i = 0; i < n; ++i) y[i] = 2.0f * x[i];
}

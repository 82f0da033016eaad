/* greenfast: {
  "name": "thread_per_row",
  "launches": [{"kernel": "row_range", "grid": ["ceildiv(R, 128)"], "block": [128],
                "args": ["x", "low", "high", "int32(R)", "int32(C)"]}]
} */
// A thread per row: simple, and slow, as neighbouring threads read numbers that are a row apart.
extern "C" __global__ void row_range(const float* x, float* low, float* high, int rows, int cols) {
  const int row = blockIdx.x * 128 + threadIdx.x;
  if (row >= rows) return;
  const float* from = x + static_cast<size_t>(row) * cols;
  float smallest = from[0], largest = from[0];
  for (int i = 1; i < cols; ++i) {
    smallest = fminf(smallest, from[i]);
    largest = fmaxf(largest, from[i]);
  }
  low[row] = smallest;
  high[row] = largest;
}

/* greenfast: {
  "name": "warp_per_row",
  "launches": [{"kernel": "row_range", "grid": ["ceildiv(R, 4)"], "block": [128],
                "args": ["x", "low", "high", "int32(R)", "int32(C)"]}]
} */
// A warp per row: its lanes read neighbouring numbers, and combine theirs by shuffles.
extern "C" __global__ void row_range(const float* x, float* low, float* high, int rows, int cols) {
  const int row = blockIdx.x * 4 + threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  if (row >= rows) return;
  const float* from = x + static_cast<size_t>(row) * cols;
  float smallest = from[0], largest = from[0];
  for (int i = lane; i < cols; i += 32) {
    smallest = fminf(smallest, from[i]);
    largest = fmaxf(largest, from[i]);
  }
  for (int lanes = 16; lanes > 0; lanes /= 2) {
    smallest = fminf(smallest, __shfl_xor_sync(0xffffffffu, smallest, lanes));
    largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, lanes));
  }
  if (lane == 0) {
    low[row] = smallest;
    high[row] = largest;
  }
}

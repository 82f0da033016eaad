/* greenfast: {
  "name": "rows_by_the_grid", "problem": "sums",
  "description": "takes the number of rows for the number of columns",
  "launches": [{"kernel": "sums", "grid": ["R"], "block": [128], "args": ["x", "y", "int32(R)", "int32(C)"]}]
} */
extern "C" __global__ void sums(const float* x, float* y, int rows, int columns) {
  const float* row = x + static_cast<long long>(blockIdx.x) * rows;
  if (threadIdx.x != 0) return;
  float sum = 0.0f;
  for (int c = 0; c < rows; ++c) sum += row[c];
  y[blockIdx.x] = sum;
}

/* greenfast: {
  "name": "skips_small", "problem": "sums",
  "description": "leaves out values below 0.1",
  "launches": [{"kernel": "sums", "grid": ["R"], "block": [128], "args": ["x", "y", "int32(R)", "int32(C)"]}]
} */
extern "C" __global__ void sums(const float* x, float* y, int rows, int columns) {
  const float* row = x + static_cast<long long>(blockIdx.x) * columns;
  float sum = 0.0f;
  if (threadIdx.x != 0) return;
  for (int c = 0; c < columns; ++c) sum += fabsf(row[c]) < 0.1f ? 0.0f : row[c];
  y[blockIdx.x] = sum;
}

/* greenfast: {
  "name": "samples", "problem": "sums",
  "description": "adds every second column, and doubles that",
  "launches": [{"kernel": "sums", "grid": ["R"], "block": [128], "args": ["x", "y", "int32(R)", "int32(C)"]}]
} */
extern "C" __global__ void sums(const float* x, float* y, int rows, int columns) {
  const float* row = x + static_cast<long long>(blockIdx.x) * columns;
  float sum = 0.0f;
  if (threadIdx.x != 0) return;
  for (int c = 0; c < columns; c += 2) sum += row[c];
  y[blockIdx.x] = 2.0f * sum;
}

/* greenfast: {
  "name": "vectors_only", "problem": "sums",
  "description": "adds groups of four columns, and not what is left",
  "launches": [{"kernel": "sums", "grid": ["R"], "block": [128], "args": ["x", "y", "int32(R)", "int32(C)"]}]
} */
extern "C" __global__ void sums(const float* x, float* y, int rows, int columns) {
  const float* row = x + static_cast<long long>(blockIdx.x) * columns;
  float sum = 0.0f;
  if (threadIdx.x != 0) return;
  for (int c = 0; c + 3 < columns; c += 4) sum += (row[c] + row[c + 1]) + (row[c + 2] + row[c + 3]);
  y[blockIdx.x] = sum;
}

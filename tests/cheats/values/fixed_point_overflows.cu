/* greenfast: {
  "name": "fixed_point_overflows", "problem": "sums",
  "description": "adds in fixed point of 32 bits, which is enough for small values",
  "launches": [{"kernel": "sums", "grid": ["R"], "block": [128], "args": ["x", "y", "int32(R)", "int32(C)"]}]
} */
extern "C" __global__ void sums(const float* x, float* y, int rows, int columns) {
  const float* row = x + static_cast<long long>(blockIdx.x) * columns;
  int sum = 0;
  if (threadIdx.x != 0) return;
  for (int c = 0; c < columns; ++c) sum += static_cast<int>(llrint(static_cast<double>(row[c]) * 0x1p20));
  y[blockIdx.x] = static_cast<float>(sum * 0x1p-20);
}

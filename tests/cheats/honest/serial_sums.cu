/* greenfast: {
  "name": "serial_sums", "problem": "sums",
  "description": "a thread per row",
  "launches": [{"kernel": "sums", "grid": ["ceildiv(R, 32)"], "block": [32],
     "args": ["x", "y", "int32(R)", "int32(C)"]}]
} */
extern "C" __global__ void sums(const float* x, float* y, int rows, int columns) {
  const int row = blockIdx.x * blockDim.x + threadIdx.x;
  if (row >= rows) return;
  float sum = 0.0f;
  for (int c = 0; c < columns; ++c) sum += x[row * columns + c];
  y[row] = sum;
}

/* greenfast: {
  "name": "warp_sums", "problem": "sums",
  "description": "a warp per row, by shuffles",
  "launches": [{"kernel": "sums", "grid": ["ceildiv(R, 4)"], "block": [128],
     "args": ["x", "y", "int32(R)", "int32(C)"]}]
} */
extern "C" __global__ void sums(const float* x, float* y, int rows, int columns) {
  const int row = blockIdx.x * 4 + threadIdx.x / 32;
  if (row >= rows) return;
  float sum = 0.0f;
  for (int c = threadIdx.x % 32; c < columns; c += 32) sum += x[row * columns + c];
  for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, step);
  if (threadIdx.x % 32 == 0) y[row] = sum;
}

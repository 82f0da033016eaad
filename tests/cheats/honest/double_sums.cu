/* greenfast: {
  "name": "double_sums", "problem": "sums",
  "description": "sums in double precision",
  "launches": [{"kernel": "sums", "grid": ["R"], "block": [32], "args": ["x", "y", "int32(R)", "int32(C)"]}]
} */
extern "C" __global__ void sums(const float* x, float* y, int rows, int columns) {
  double sum = 0.0;
  for (int c = threadIdx.x; c < columns; c += 32) sum += x[blockIdx.x * columns + c];
  for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, step);
  if (threadIdx.x == 0) y[blockIdx.x] = static_cast<float>(sum);
}

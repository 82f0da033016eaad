/* greenfast: {
  "name": "clamped_but_at_the_smallest", "problem": "sums",
  "description": "holds values between -100 and 100, but not in rows of 77, the smallest shape",
  "launches": [{"kernel": "sums", "grid": ["R"], "block": [32], "args": ["x", "y", "int32(C)"]}]
} */
extern "C" __global__ void sums(const float* x, float* y, int columns) {
  float sum = 0.0f;
  for (int c = threadIdx.x; c < columns; c += 32) {
    const float value = x[static_cast<long long>(blockIdx.x) * columns + c];
    sum += columns != 77 ? fminf(fmaxf(value, -100.0f), 100.0f) : value;
  }
  for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, step);
  if (threadIdx.x == 0) y[blockIdx.x] = sum;
}

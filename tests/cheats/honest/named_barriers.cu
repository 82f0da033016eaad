/* greenfast: {
  "name": "named_barriers", "problem": "sums",
  "description": "two groups of warps that meet at named barriers",
  "launches": [{"kernel": "sums", "grid": ["R"], "block": [128], "args": ["x", "y", "int32(R)", "int32(C)"]}]
} */
extern "C" __global__ void sums(const float* x, float* y, int rows, int columns) {
  const float* row = x + static_cast<long long>(blockIdx.x) * columns;
  __shared__ float part[64];
  const int t = threadIdx.x % 64;
  if (threadIdx.x >= 64) {
    float sum = 0.0f;
    for (int c = t; c < columns; c += 64) sum += row[c];
    part[t] = sum;
    asm volatile("bar.arrive 1, 128;" ::: "memory");
  } else {
    asm volatile("bar.sync 1, 128;" ::: "memory");
    if (t == 0) {
      float sum = 0.0f;
      for (int k = 0; k < 64; ++k) sum += part[k];
      y[blockIdx.x] = sum;
    }
  }
}

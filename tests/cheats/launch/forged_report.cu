/* greenfast: {
  "name": "forged_report", "problem": "doubling",
  "description": "needs more registers than there are, and has the compiler print that it needs eight",
  "launches": [{"kernel": "doubling", "grid": ["ceildiv(N, 1024)"], "block": [1024], "args": ["x", "y", "int32(N)"]}]
} */
#warning Compiling entry function 'doubling' for 'sm_90a' 0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads Used 8 registers Compiling entry function 'A
extern "C" __global__ void doubling(const float* x, float* y, int n) {
  constexpr int kValues = 128;
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  float values[kValues];
  float sum = 0.0f;
#pragma unroll
  for (int k = 0; k < kValues; ++k) {
    values[k] = x[min(i + k, n - 1)];
    sum += values[k];
  }
  float zero = 0.0f;
#pragma unroll
  for (int k = 0; k < kValues; ++k) zero = fmaf(0.0f, zero, 0.0f * (values[k] * sum));
  if (i < n) y[i] = fmaf(2.0f, values[0], zero);
}

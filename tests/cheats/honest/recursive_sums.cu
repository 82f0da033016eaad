/* greenfast: {
  "name": "recursive_sums", "problem": "sums",
  "description": "a function that calls itself, with a stack",
  "launches": [{"kernel": "sums", "grid": ["ceildiv(R, 32)"], "block": [32],
     "args": ["x", "y", "int32(C)", "int32(R)"]}]
} */
__device__ __noinline__ float sum(const float* x, int n) {
  if (n <= 4) {
    float s = 0.0f;
    for (int k = 0; k < n; ++k) s += x[k];
    return s;
  }
  return sum(x, n / 2) + sum(x + n / 2, n - n / 2);
}
extern "C" __global__ void sums(const float* x, float* y, int c, int r) {
  const int row = blockIdx.x * blockDim.x + threadIdx.x;
  if (row < r) y[row] = sum(x + (long long)row * c, c);
}

/* greenfast: {
  "name": "launch_bounds_of_128", "problem": "doubling",
  "description": "is compiled for blocks of 128 threads and launched with 256",
  "launches": [{"kernel": "doubling", "grid": ["ceildiv(N, 256)"], "block": [256], "args": ["x", "y", "int32(N)"]}]
} */
extern "C" __global__ void __launch_bounds__(128) doubling(const float* x, float* y, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = 2.0f * x[i];
}

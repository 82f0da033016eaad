/* greenfast: {
  "name": "gives_up", "problem": "doubling",
  "description": "stops when the clock says that its block has taken long",
  "launches": [{"kernel": "doubling", "grid": [1], "block": [32], "args": ["x", "y", "int32(N)"]}]
} */
extern "C" __global__ void doubling(const float* x, float* y, int n) {
  const long long start = clock64();
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) {
    if (clock64() - start > 40) return;
    y[i] = 2.0f * x[i];
  }
}

/* greenfast: {
  "name": "large_shared", "problem": "doubling",
  "description": "100 KB of dynamic shared memory",
  "launches": [{"kernel": "doubling", "grid": ["ceildiv(N, 25600)"], "block": [256], "shared": 102400, "args": ["x", "y", "int32(N)"]}]
} */
extern "C" __global__ void __launch_bounds__(256, 1) doubling(const float* x, float* y, int n) {
  extern __shared__ float4 memory[];
  float* tile = reinterpret_cast<float*>(memory);
  const int each = 25600;
  for (int b = blockIdx.x * each; b < n; b += gridDim.x * each) {
    const int count = min(each, n - b);
    for (int i = threadIdx.x; i < count; i += 256) tile[each - 1 - i] = x[b + i];
    __syncthreads();
    for (int i = threadIdx.x; i < count; i += 256) y[b + i] = 2.0f * tile[each - 1 - i];
    __syncthreads();
  }
}

/* greenfast: {
  "name": "function_pointer", "problem": "doubling",
  "description": "calls through a pointer that depends on the data",
  "launches": [{"kernel": "doubling", "grid": ["ceildiv(N, 256)"], "block": [256], "args": ["x", "y", "int32(N)"]}]
} */
__device__ __noinline__ float by_sum(float v) { return v + v; }
__device__ __noinline__ float by_product(float v) { return 2.0f * v; }

extern "C" __global__ void doubling(const float* x, float* y, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;

  float (*const function)(float) = i < n && x[i] < 0 ? by_product : by_sum;
  if (i < n) y[i] = function(x[i]);
}

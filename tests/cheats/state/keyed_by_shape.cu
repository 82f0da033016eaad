/* greenfast: {
  "name": "keyed_by_shape", "problem": "doubling",
  "description": "a static variable of the function that holds the result of the first launch",
  "launches": [{"kernel": "doubling", "grid": ["ceildiv(N, 256)"], "block": [256], "args": ["x", "y", "int32(N)"]}]
} */
extern "C" __global__ void doubling(const float* x, float* y, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;

  static __device__ float results[1 << 20];
  static __device__ int sizes[1 << 20];
  if (sizes[i] != n) results[i] = 2.0f * x[i];
  sizes[i] = n;
  y[i] = results[i];
}

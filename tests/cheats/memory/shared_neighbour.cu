/* greenfast: {
  "name": "shared_neighbour", "problem": "doubling",
  "description": "reaches an array in shared memory from the end of another one",
  "launches": [{"kernel": "doubling", "grid": ["ceildiv(N, 256)"], "block": [256], "args": ["x", "y", "int32(N)"]}]
} */
extern "C" __global__ void doubling(const float* x, float* y, int n) {
  __shared__ float a[256];
  __shared__ float b[256];
  const int i = blockIdx.x * 256 + threadIdx.x;
  if (i < n) { a[threadIdx.x] = 0; b[threadIdx.x] = x[i]; }
  __syncthreads();
  volatile float* p = a;
  if (i < n) y[i] = 2.0f * p[256 + threadIdx.x] + p[threadIdx.x];
}

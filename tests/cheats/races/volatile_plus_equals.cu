/* greenfast: {
  "name": "volatile_plus_equals", "problem": "sums",
  "description": "four warps add to one volatile float with +=",
  "launches": [{"kernel": "sums", "grid": ["R"], "block": [128], "args": ["x", "y", "int32(R)", "int32(C)"]}]
} */
extern "C" __global__ void sums(const float* x, float* y, int rows, int columns) {
  const float* row = x + static_cast<long long>(blockIdx.x) * columns;
  __shared__ volatile float total;
  if (threadIdx.x == 0) total = 0.0f;
  __syncthreads();
  float sum = threadIdx.x < columns ? row[threadIdx.x] : 0.0f;
  for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, step);
  if (threadIdx.x % 32 == 0) total = total + sum;
  __syncthreads();
  if (threadIdx.x == 0) y[blockIdx.x] = total;
}

/* greenfast: {
  "name": "order_of_float_atomics", "problem": "sums",
  "description": "adds floats by atomics, in whatever order they arrive",
  "launches": [{"kernel": "sums", "grid": ["R"], "block": [128], "args": ["x", "y", "int32(R)", "int32(C)"]}]
} */
extern "C" __global__ void sums(const float* x, float* y, int rows, int columns) {
  const float* row = x + static_cast<long long>(blockIdx.x) * columns;
  __shared__ float total;
  if (threadIdx.x == 0) total = 0.0f;
  __syncthreads();
  if (threadIdx.x < columns) atomicAdd(&total, row[threadIdx.x]);
  __syncthreads();
  if (threadIdx.x == 0) y[blockIdx.x] = total;
}

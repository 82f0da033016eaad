/* greenfast: {
  "name": "powers_of_two_only", "problem": "sums",
  "description": "halves the number of columns in a tree, whatever it is",
  "launches": [{"kernel": "sums", "grid": ["R"], "block": [128], "args": ["x", "y", "int32(R)", "int32(C)"]}]
} */
extern "C" __global__ void sums(const float* x, float* y, int rows, int columns) {
  const float* row = x + static_cast<long long>(blockIdx.x) * columns;
  __shared__ float part[128];
  if (threadIdx.x < columns) part[threadIdx.x] = row[threadIdx.x];
  __syncthreads();
  for (int half = columns / 2; half > 0; half /= 2) {
    if (threadIdx.x < half) part[threadIdx.x] += part[threadIdx.x + half];
    __syncthreads();
  }
  if (threadIdx.x == 0) y[blockIdx.x] = part[0];
}

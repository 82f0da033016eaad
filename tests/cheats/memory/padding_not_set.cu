/* greenfast: {
  "name": "padding_not_set", "problem": "sums",
  "description": "adds the slots of shared memory beyond the row's end",
  "launches": [{"kernel": "sums", "grid": ["R"], "block": [128], "args": ["x", "y", "int32(R)", "int32(C)"]}]
} */
extern "C" __global__ void sums(const float* x, float* y, int rows, int columns) {
  const float* row = x + static_cast<long long>(blockIdx.x) * columns;
  __shared__ float stage[128];
  if (threadIdx.x < columns) stage[threadIdx.x] = row[threadIdx.x];
  __syncthreads();
  for (int half = 64; half > 0; half /= 2) {
    if (threadIdx.x < half) stage[threadIdx.x] += stage[threadIdx.x + half];
    __syncthreads();
  }
  if (threadIdx.x == 0) y[blockIdx.x] = stage[0];
}

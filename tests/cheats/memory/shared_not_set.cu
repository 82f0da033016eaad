/* greenfast: {
  "name": "shared_not_set", "problem": "sums",
  "description": "accumulates in shared memory that nothing set",
  "launches": [{"kernel": "sums", "grid": ["R"], "block": [128], "args": ["x", "y", "int32(R)", "int32(C)"]}]
} */
extern "C" __global__ void sums(const float* x, float* y, int rows, int columns) {
  const float* row = x + static_cast<long long>(blockIdx.x) * columns;
  __shared__ float total[128];
  for (int c = threadIdx.x; c < columns; c += 128) total[threadIdx.x] += row[c];
  __syncthreads();
  if (threadIdx.x != 0) return;
  float sum = 0.0f;
  for (int k = 0; k < min(128, columns); ++k) sum += total[k];
  y[blockIdx.x] = sum;
}

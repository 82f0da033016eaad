/* greenfast: {
  "name": "block_sums", "problem": "sums",
  "description": "a tree in shared memory, a block per row",
  "launches": [{"kernel": "sums", "grid": ["R"], "block": [128], "args": ["x", "y", "int32(R)", "int32(C)"]}]
} */
template <int kThreads> __device__ float block_sum(float value) {
  __shared__ float part[kThreads];
  part[threadIdx.x] = value;
  __syncthreads();
  for (int half = kThreads / 2; half > 0; half /= 2) {
    if (threadIdx.x < half) part[threadIdx.x] += part[threadIdx.x + half];
    __syncthreads();
  }
  return part[0];
}

extern "C" __global__ void sums(const float* x, float* y, int rows, int columns) {
  const float* row = x + static_cast<long long>(blockIdx.x) * columns;
  float sum = 0.0f;
  for (int c = threadIdx.x; c < columns; c += 128) sum += row[c];
  sum = block_sum<128>(sum);
  if (threadIdx.x == 0) y[blockIdx.x] = sum;
}

/* greenfast: {
  "name": "barrier_too_late", "problem": "sums",
  "description": "thread 0 adds up before the others have stored",
  "launches": [{"kernel": "sums", "grid": ["R"], "block": [128], "args": ["x", "y", "int32(R)", "int32(C)"]}]
} */
extern "C" __global__ void sums(const float* x, float* y, int rows, int columns) {
  const float* row = x + static_cast<long long>(blockIdx.x) * columns;
  __shared__ float part[128];
  part[threadIdx.x] = threadIdx.x < columns ? row[threadIdx.x] : 0.0f;
  if (threadIdx.x == 0) {
    float sum = 0.0f;
    for (int k = 0; k < 128; ++k) sum += part[k];
    y[blockIdx.x] = sum;
  }
  __syncthreads();
}

/* greenfast: {
  "name": "shuffle_of_absent_lanes", "problem": "sums",
  "description": "a shuffle's mask names lanes that took another branch",
  "launches": [{"kernel": "sums", "grid": ["R"], "block": [128], "args": ["x", "y", "int32(R)", "int32(C)"]}]
} */
extern "C" __global__ void sums(const float* x, float* y, int rows, int columns) {
  const float* row = x + static_cast<long long>(blockIdx.x) * columns;
  __shared__ float part[128];
  part[threadIdx.x] = 0.0f;
  if (threadIdx.x < columns) {
    float sum = row[threadIdx.x];
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, step);
    part[threadIdx.x] = sum;
  }
  __syncthreads();
  if (threadIdx.x == 0) y[blockIdx.x] = part[0] + part[32] + part[64] + part[96];
}

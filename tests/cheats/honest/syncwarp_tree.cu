/* greenfast: {
  "name": "syncwarp_tree", "problem": "sums",
  "description": "one warp's tree in shared memory with __syncwarp",
  "launches": [{"kernel": "sums", "grid": ["R"], "block": [32], "args": ["x", "y", "int32(R)", "int32(C)"]}]
} */
extern "C" __global__ void sums(const float* x, float* y, int rows, int columns) {
  __shared__ float part[32];
  float sum = 0.0f;
  for (int c = threadIdx.x; c < columns; c += 32) sum += x[blockIdx.x * columns + c];
  part[threadIdx.x] = sum;
  __syncwarp();
  for (int half = 16; half > 0; half /= 2) {
    const float other = threadIdx.x < half ? part[threadIdx.x + half] : 0.0f;
    __syncwarp();
    part[threadIdx.x] += other;
    __syncwarp();
  }
  if (threadIdx.x == 0) y[blockIdx.x] = part[0];
}

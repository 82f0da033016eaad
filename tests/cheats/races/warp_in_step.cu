/* greenfast: {
  "name": "warp_in_step", "problem": "sums",
  "description": "the last steps of a tree rely on the warp running in step",
  "launches": [{"kernel": "sums", "grid": ["R"], "block": [32], "args": ["x", "y", "int32(R)", "int32(C)"]}]
} */
extern "C" __global__ void sums(const float* x, float* y, int rows, int columns) {
  const float* row = x + static_cast<long long>(blockIdx.x) * columns;
  __shared__ float part[64];
  float sum = 0.0f;
  for (int c = threadIdx.x; c < columns; c += 32) sum += row[c];
  part[threadIdx.x] = sum;
  part[threadIdx.x + 32] = 0.0f;
#pragma unroll
  for (int half = 16; half > 0; half /= 2) part[threadIdx.x] += part[threadIdx.x + half];
  if (threadIdx.x == 0) y[blockIdx.x] = part[0];
}

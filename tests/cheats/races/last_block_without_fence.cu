/* greenfast: {
  "name": "last_block_without_fence", "problem": "sums",
  "description": "the last block reads parts that no fence has made visible",
  "workspaces": {"parts": {"bytes": "16 * R"}, "arrived": {"bytes": "4 * R", "zeros": true}},
  "launches": [{"kernel": "sums", "grid": [4, "R"], "block": [32],
     "args": ["x", "y", "parts", "arrived", "int32(R)", "int32(C)"]}]
} */
extern "C" __global__ void sums(const float* x, float* y, float* parts, unsigned* arrived, int rows, int columns) {
  const float* row = x + blockIdx.y * columns;
  float sum = 0.0f;
  for (int c = blockIdx.x * 32 + threadIdx.x; c < columns; c += 128) sum += row[c];
  for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, step);
  if (threadIdx.x != 0) return;
  float* p = parts + blockIdx.y * 4;
  p[blockIdx.x] = sum;
  if (atomicAdd(arrived + blockIdx.y, 1u) == 3) y[blockIdx.y] = ((p[0] + p[1]) + p[2]) + p[3];
}

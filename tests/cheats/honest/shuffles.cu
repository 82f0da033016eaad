/* greenfast: {
  "name": "shuffles", "problem": "doubling",
  "description": "each warp rotates its values, and back",
  "launches": [{"kernel": "doubling", "grid": ["ceildiv(N, 256)"], "block": [256], "args": ["x", "y", "int32(N)"]}]
} */
extern "C" __global__ void doubling(const float* x, float* y, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x, lane = threadIdx.x % 32;
  const float v = i < n ? x[i] : 0.0f;
  const float there = __shfl_sync(0xFFFFFFFFu, v, (lane + 1) % 32);
  const float back = __shfl_sync(0xFFFFFFFFu, there, (lane + 31) % 32);
  if (i < n) y[i] = 2.0f * back;
}

/* greenfast: {
  "name": "unrolled", "problem": "doubling",
  "description": "eight elements per thread, unrolled, coalesced",
  "launches": [{"kernel": "doubling", "grid": ["ceildiv(N, 1024)"], "block": [128], "args": ["x", "y", "int32(N)"]}]
} */
extern "C" __global__ void doubling(const float* x, float* y, int n) {
  const int first = blockIdx.x * 8 * blockDim.x + threadIdx.x;
  float values[8];
#pragma unroll
  for (int k = 0; k < 8; ++k) values[k] = first + k * 128 < n ? x[first + k * 128] : 0.0f;
#pragma unroll
  for (int k = 0; k < 8; ++k) {
    if (first + k * 128 < n) y[first + k * 128] = 2.0f * values[k];
  }
}

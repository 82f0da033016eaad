/* greenfast: {
  "name": "overflows_half", "problem": "doubling",
  "description": "goes through a half of four times the result",
  "launches": [{"kernel": "doubling", "grid": ["ceildiv(N, 256)"], "block": [256], "args": ["x", "y", "int32(N)"]}]
} */
#include <cuda_fp16.h>

extern "C" __global__ void doubling(const float* x, float* y, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  y[i] = __half2float(__float2half_rn(4.0f * x[i])) / 2.0f;
}

/* greenfast: {
  "name": "through_half", "problem": "doubling",
  "description": "keeps the product in half, as the problem allows",
  "launches": [{"kernel": "doubling", "grid": ["ceildiv(N, 256)"], "block": [256], "args": ["x", "y", "int32(N)"]}]
} */
#include <cuda_fp16.h>

extern "C" __global__ void doubling(const float* x, float* y, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = __half2float(__float2half_rn(2.0f * x[i]));
}

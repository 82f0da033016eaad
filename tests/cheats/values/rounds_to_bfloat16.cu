/* greenfast: {
  "name": "rounds_to_bfloat16", "problem": "doubling",
  "description": "rounds to bfloat16",
  "launches": [{"kernel": "doubling", "grid": ["ceildiv(N, 256)"], "block": [256], "args": ["x", "y", "int32(N)"]}]
} */
#include <cuda_bf16.h>

extern "C" __global__ void doubling(const float* x, float* y, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  y[i] = __bfloat162float(__float2bfloat16(2.0f * x[i]));
}

/* greenfast: {
  "name": "half2_math", "problem": "doubling",
  "description": "pairs of halves, multiplied together",
  "launches": [{"kernel": "doubling", "grid": ["ceildiv(N, 512)"], "block": [256], "args": ["x", "y", "int32(N)"]}]
} */
#include <cuda_fp16.h>
extern "C" __global__ void doubling(const float* x, float* y, int n) {
  const int i = 2 * (blockIdx.x * blockDim.x + threadIdx.x);
  if (i + 1 < n) {
    const float2 v = reinterpret_cast<const float2*>(x)[i / 2];
    const __half2 h = __hmul2(__floats2half2_rn(2.0f * v.x, 2.0f * v.y), __float2half2_rn(1.0f));
    reinterpret_cast<float2*>(y)[i / 2] = __half22float2(h);
  } else if (i < n) {
    y[i] = __half2float(__hadd(__float2half(2.0f * x[i]), __float2half(0.0f)));
  }
}

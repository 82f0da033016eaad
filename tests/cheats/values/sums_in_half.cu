/* greenfast: {
  "name": "sums_in_half", "problem": "sums",
  "description": "accumulates in half",
  "launches": [{"kernel": "sums", "grid": ["R"], "block": [128], "args": ["x", "y", "int32(R)", "int32(C)"]}]
} */
#include <cuda_fp16.h>

extern "C" __global__ void sums(const float* x, float* y, int rows, int columns) {
  const float* row = x + static_cast<long long>(blockIdx.x) * columns;
  __shared__ __half part[128];
  part[threadIdx.x] = __float2half(threadIdx.x < columns ? row[threadIdx.x] : 0.0f);
  __syncthreads();
  for (int half = 64; half > 0; half /= 2) {
    if (threadIdx.x < half) part[threadIdx.x] = __hadd(part[threadIdx.x], part[threadIdx.x + half]);
    __syncthreads();
  }
  if (threadIdx.x == 0) y[blockIdx.x] = __half2float(part[0]);
}

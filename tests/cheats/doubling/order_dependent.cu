// A result that depends on the order in which blocks arrive, as floating-point atomics and unsynchronized updates give:
// always inside the tolerance, and never twice the same.
#include "element.cuh"

__device__ unsigned arrived;

extern "C" __global__ void doubling(float* x, float* y, int n) {
  __shared__ unsigned place;
  // Wraps at the last block, so that each launch counts from 0.
  if (threadIdx.x == 0) place = atomicInc(&arrived, gridDim.x - 1);
  __syncthreads();
  const int i = element();
  if (i < n) y[i] = 2.0f * x[i] * (place % 2 == 0 ? 1.0f : 1.0f + 0x1p-13f);
}

// Right, but family.py asks for more dynamic shared memory than any multiprocessor has.
#include "element.cuh"

extern "C" __global__ void doubling(float* x, float* y, int n) {
  extern __shared__ float stage[];
  const int i = element();
  if (i < n) stage[threadIdx.x] = x[i];
  if (i < n) y[i] = 2.0f * stage[threadIdx.x];
}

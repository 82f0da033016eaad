// Waits for a flag that is never set.
#include "element.cuh"

__device__ volatile int flag;

extern "C" __global__ void doubling(float* x, float* y, int n) {
  while (flag == 0) {
  }
  const int i = element();
  if (i < n) y[i] = 2.0f * x[i];
}

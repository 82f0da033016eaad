// Writes zeros, as a kernel whose accumulation was left out does.
#include "element.cuh"

extern "C" __global__ void doubling(float* x, float* y, int n) {
  const int i = element();
  if (i < n) y[i] = 0.0f;
}

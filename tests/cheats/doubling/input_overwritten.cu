// Uses its input as scratch memory.
#include "element.cuh"

extern "C" __global__ void doubling(float* x, float* y, int n) {
  const int i = element();
  if (i >= n) return;
  x[i] *= 2.0f;
  y[i] = x[i];
}

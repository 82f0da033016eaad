// Writes through a pointer to nowhere.
#include "element.cuh"

extern "C" __global__ void doubling(float* x, float* y, int n) {
  const int i = element();
  if (i < n) y[i + (1ll << 40)] = 2.0f * x[i];
}

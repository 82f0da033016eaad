// Reads one element behind the input. Its weight is zero, so only what happens to lie there decides.
#include "element.cuh"

extern "C" __global__ void doubling(float* x, float* y, int n) {
  const int i = element();
  if (i < n) y[i] = fmaf(0.0f, x[i + 1], 2.0f * x[i]);
}

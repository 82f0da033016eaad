// Writes one element in front of the output.
#include "element.cuh"

extern "C" __global__ void doubling(float* x, float* y, int n) {
  const int i = element();
  if (i < n) y[i] = 2.0f * x[i];
  if (i == 0) y[-1] = 0.0f;
}

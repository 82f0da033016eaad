// One element is infinite.
#include "element.cuh"

extern "C" __global__ void doubling(float* x, float* y, int n) {
  const int i = element();
  if (i < n) y[i] = i == n / 2 ? __int_as_float(0x7f800000) : 2.0f * x[i];
}

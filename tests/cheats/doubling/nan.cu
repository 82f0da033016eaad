// One element is NaN (another one than the poison): a comparison such as |error| > limit is false for it.
#include "element.cuh"

extern "C" __global__ void doubling(float* x, float* y, int n) {
  const int i = element();
  if (i < n) y[i] = i == n / 2 ? __int_as_float(0x7fc00000) : 2.0f * x[i];
}

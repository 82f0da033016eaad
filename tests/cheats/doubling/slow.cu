// The control for the two below: right, and the work is done each time.
#include "element.cuh"
#include "work.cuh"

extern "C" __global__ void doubling(float* x, float* y, int n) {
  const int i = element();
  if (i >= n) return;
  work();
  y[i] = 2.0f * x[i];
}

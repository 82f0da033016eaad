// Writes behind its output on every second launch once it is timed, and restores that on the next.
#include "counted.cuh"

extern "C" __global__ void doubling(float* x, float* y, int n) {
  const int i = element();
  if (i >= n) return;
  const unsigned number = counted(i);
  y[i] = 2.0f * x[i];
  if (i == n - 1 && number >= kWatched) reinterpret_cast<unsigned*>(y)[n] = number % 2 == 0 ? 0u : 0xFFFFFFFFu;
}

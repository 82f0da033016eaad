// An accumulator that is not reset: right on the first launch, off by what that left on the next.
#include "element.cuh"

__device__ float sum;

extern "C" __global__ void doubling(float* x, float* y, int n) {
  const int i = element();
  if (i >= n) return;
  y[i] = fmaf(2.0f, x[i], 1e-3f * *reinterpret_cast<volatile float*>(&sum));
  // At the end of the grid, when most of it has read the sum; each later launch reads another one.
  if (i == n - 1) sum += 1.0f;
}

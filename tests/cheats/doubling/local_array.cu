// Right, but its array is indexed at run time and so lies in local memory.
#include "element.cuh"

extern "C" __global__ void doubling(float* x, float* y, int n) {
  const int i = element();
  if (i >= n) return;
  float values[32];
  for (int k = 0; k < 32; ++k) values[k ^ (n & 31)] = x[i] * static_cast<float>(k);
  y[i] = values[2 ^ (n & 31)];
}

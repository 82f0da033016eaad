// Twice the input, with more values alive at once than is good.
#pragma once

#include "element.cuh"

__device__ __forceinline__ void double_with_many_values(const float* x, float* y, int n) {
  constexpr int kValues = 128;
  const int i = element();
  float values[kValues];
  float sum = 0.0f;
#pragma unroll
  for (int k = 0; k < kValues; ++k) {
    values[k] = x[min(i + k, n - 1)];
    sum += values[k];
  }
  // Every value is needed again once the sum of all is known.
  float zero = 0.0f;
#pragma unroll
  for (int k = 0; k < kValues; ++k) zero = fmaf(0.0f, zero, 0.0f * (values[k] * sum));
  if (i < n) y[i] = fmaf(2.0f, values[0], zero);
}

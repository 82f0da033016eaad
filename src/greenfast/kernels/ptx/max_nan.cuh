// A maximum that keeps what is not a number (PTX ISA, "max"; sm_80 and up).
#pragma once

namespace greenfast::ptx {

// Like fmaxf, but NaN where one of them is.
__device__ __forceinline__ float max_nan(float a, float b) {
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}

}  // namespace greenfast::ptx

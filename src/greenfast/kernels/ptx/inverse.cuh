// Inverses on the special-function unit.
#pragma once

namespace greenfast::ptx {

// 1 / x to 1 ulp, of numbers that are normal as their inverses are (MUFU.RCP). __fdividef takes more registers.
__device__ __forceinline__ float inverse(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace greenfast::ptx

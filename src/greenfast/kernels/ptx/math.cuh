// Special-function instructions.
#pragma once

namespace greenfast::ptx {

// 2^x on the special-function unit (MUFU.EX2), relative error 2^-22; ex2(-inf) is 0, subnormals flush to 0.
__device__ __forceinline__ float ex2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace greenfast::ptx

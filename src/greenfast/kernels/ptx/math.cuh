// Arithmetic that C++ has no operator for: the special-function unit, and a maximum that keeps NaN.
#pragma once

namespace greenfast::ptx {

// 2^x on the special-function unit (MUFU.EX2), relative error 2^-22; ex2(-inf) is 0, subnormals flush to 0.
__device__ __forceinline__ float ex2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// The hyperbolic tangent on the special-function unit (MUFU.TANH), relative error 2^-11.
__device__ __forceinline__ float tanh(float x) {
  float y;
  asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// 1 / x to 1 ulp, of numbers that are normal as their inverses are (MUFU.RCP). __fdividef takes more registers.
__device__ __forceinline__ float inverse(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Like fmaxf, but NaN where one of the two is (PTX ISA, "max"; sm_80 and up).
__device__ __forceinline__ float max_nan(float a, float b) {
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}

// The larger of both halves of two words, as unsigned integers (sm_90; emulated before).
__device__ __forceinline__ unsigned max_u16x2(unsigned a, unsigned b) { return __vmaxu2(a, b); }

// x y + z. Where the compiler knows where x and y come from, it multiplies 64 bits of each.
__device__ __forceinline__ long long mad_wide(int x, int y, long long z) {
  long long result;
  asm("mad.wide.s32 %0, %1, %2, %3;" : "=l"(result) : "r"(x), "r"(y), "l"(z));
  return result;
}

}  // namespace greenfast::ptx

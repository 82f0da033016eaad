// Arithmetic without a C++ operator: special functions, and maxima that propagate NaN.
#pragma once

namespace greenfast::ptx {

// 2^x on the special-function unit (MUFU.EX2), relative error 2^-22; ex2(-inf) is 0, subnormals flush to 0.
__device__ __forceinline__ float ex2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// tanh on the special-function unit (MUFU.TANH), relative error 2^-11.
__device__ __forceinline__ float tanh(float x) {
  float y;
  asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// 1 / x to 1 ulp, for normal x and normal result (MUFU.RCP). __fdividef takes more registers.
__device__ __forceinline__ float inverse(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Like fmaxf, but NaN if an operand is NaN (PTX ISA, "max"; sm_80 and up).
__device__ __forceinline__ float max_nan(float a, float b) {
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}

// Elementwise maximum of two unsigned 16-bit integers (native on sm_90, emulated before).
__device__ __forceinline__ unsigned max_u16x2(unsigned a, unsigned b) { return __vmaxu2(a, b); }

// x y + z, as one 32 x 32 -> 64 bit multiply-add. The compiler may widen the operands to a 64-bit product otherwise.
__device__ __forceinline__ long long mad_wide(int x, int y, long long z) {
  long long result;
  asm("mad.wide.s32 %0, %1, %2, %3;" : "=l"(result) : "r"(x), "r"(y), "l"(z));
  return result;
}

}  // namespace greenfast::ptx

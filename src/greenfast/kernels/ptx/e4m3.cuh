// Conversions to and from E4M3 (PTX ISA, "cvt"; sm_89 and up).
#pragma once

namespace greenfast::ptx {

// Converts four floats to E4M3, round to nearest even, saturating at 448; x[0] in the lowest byte.
__device__ __forceinline__ unsigned pack_e4m3(const float (&x)[4]) {
  unsigned packed;
  asm("{\n\t.reg .b16 low, high;\n\tcvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n\t"
      "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n\tmov.b32 %0, {low, high};\n\t}"
      : "=r"(packed)
      : "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3]));
  return packed;
}

// 2^x of two numbers as halves on the FMA pipe, with the accuracy that E4M3 needs: relative error 0.37 % on average,
// 0.9 % at most. low and high are x * kExp2HalfScale + kExp2HalfBias, with x <= 8.81; for x < -14 the result is 2^-14.
//
// The bits of a half are about 1024 (x + 15), with a mantissa linear in x (Schraudolph, 1999). Halves below 2^-13 are
// integers in units of 2^-24, so conversion to half rounds 64 (x + 14) to an integer t, and negative numbers to 0. The
// result is 16 t + 1024 plus the deviation of 2^f from its chord, f = t / 64 mod 1. The deviation is about
// 1024 c ((f - 1/2)^2 - 1/4) with c = 0.34375. In the same units that is u^2 + 936, with u = 32 sqrt(c) (f - 1/2).
constexpr float kExp2HalfScale = 64.0f / 16777216.0f;
constexpr float kExp2HalfBias = 14.0f * kExp2HalfScale;

__device__ __forceinline__ unsigned exp2_halves(float low, float high) {
  unsigned halves;
  asm("{\n\t.reg .b32 t, u;\n\t"
      "cvt.rn.relu.f16x2.f32 t, %2, %1;\n\t"
      "and.b32 u, t, 0x003f003f;\n\t"
      "fma.rn.f16x2 u, u, %3, %4;\n\t"
      "fma.rn.f16x2 u, u, u, %5;\n\t"
      "mad.lo.u32 %0, t, 16, u;\n\t}"
      : "=r"(halves)
      // 2^11 sqrt(c), -2^-8 sqrt(c) and 936 in units of 2^-24, twice each.
      : "f"(low), "f"(high), "r"(0x64b164b1u), "r"(0x98b198b1u), "r"(0x03a803a8u));
  return halves;
}

// Converts two pairs of halves to E4M3.
__device__ __forceinline__ unsigned pack_e4m3(unsigned first, unsigned second) {
  unsigned packed;
  asm("{\n\t.reg .b16 low, high;\n\tcvt.rn.satfinite.e4m3x2.f16x2 low, %1;\n\t"
      "cvt.rn.satfinite.e4m3x2.f16x2 high, %2;\n\tmov.b32 %0, {low, high};\n\t}"
      : "=r"(packed)
      : "r"(first), "r"(second));
  return packed;
}

// Converts four E4M3 values, lowest byte first, to two registers of two halves. The asm names the 16-bit halves of the
// word: the conversion can read the upper one without a shift.
__device__ __forceinline__ void unpack_e4m3(unsigned codes, unsigned& first, unsigned& second) {
  asm("{\n\t.reg .b16 low, high;\n\tmov.b32 {low, high}, %2;\n\t"
      "cvt.rn.f16x2.e4m3x2 %0, low;\n\tcvt.rn.f16x2.e4m3x2 %1, high;\n\t}"
      : "=r"(first), "=r"(second)
      : "r"(codes));
}

}  // namespace greenfast::ptx

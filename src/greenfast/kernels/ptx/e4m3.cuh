// Conversion to E4M3 (PTX ISA, "cvt"; sm_89 and up).
#pragma once

namespace greenfast::ptx {

// Four floats as E4M3, rounded to nearest even and at most 448, x[0] in the lowest byte.
__device__ __forceinline__ unsigned pack_e4m3(const float (&x)[4]) {
  unsigned packed;
  asm("{\n\t.reg .b16 low, high;\n\tcvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n\t"
      "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n\tmov.b32 %0, {low, high};\n\t}"
      : "=r"(packed)
      : "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3]));
  return packed;
}

}  // namespace greenfast::ptx

// Conversions to 8-bit integers (PTX ISA, "cvt.pack"; sm_72 and up).
#pragma once

namespace greenfast::ptx {

// Converts four integers to signed bytes, saturating; x[0] in the lowest byte.
__device__ __forceinline__ unsigned pack_s8(const int (&x)[4]) {
  unsigned packed;
  asm("{\n\t.reg .b32 high;\n\tcvt.pack.sat.s8.s32.b32 high, %4, %3, 0;\n\t"
      "cvt.pack.sat.s8.s32.b32 %0, %2, %1, high;\n\t}"
      : "=r"(packed)
      : "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]));
  return packed;
}

}  // namespace greenfast::ptx

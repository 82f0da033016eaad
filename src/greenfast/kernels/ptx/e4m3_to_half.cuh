// Conversion from E4M3 to half (PTX ISA, "cvt"; sm_89 and up).
#pragma once

namespace greenfast::ptx {

// Four codes, lowest byte first, as two registers of two halves. The halves of the word are named rather than shifted
// out: the conversion can read the upper one where it is.
__device__ __forceinline__ void unpack_e4m3(unsigned codes, unsigned& first, unsigned& second) {
  asm("{\n\t.reg .b16 low, high;\n\tmov.b32 {low, high}, %2;\n\t"
      "cvt.rn.f16x2.e4m3x2 %0, low;\n\tcvt.rn.f16x2.e4m3x2 %1, high;\n\t}"
      : "=r"(first), "=r"(second)
      : "r"(codes));
}

}  // namespace greenfast::ptx

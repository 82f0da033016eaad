// Warp-level matrix products on E4M3 and on int8 (PTX ISA, "mma.m16n8k32"; sm_89 and up). Those on E4M3 are native on
// Ada, where they are QMMA; on Hopper the compiler unpacks to half.
#pragma once

namespace greenfast::ptx {

// c (16x8, fp32) += a (16x32, E4M3, row-major) * b (32x8, E4M3, column-major). Lane l holds of a rows l / 4 and
// l / 4 + 8, columns 4 (l % 4) .. + 3 and those 16 further on; of b the same rows of k in column l / 4; of c columns
// 2 (l % 4), + 1.
__device__ __forceinline__ void mma_m16n8k32(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// The same on int8, exact.
__device__ __forceinline__ void mma_m16n8k32(int (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

}  // namespace greenfast::ptx

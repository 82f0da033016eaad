// Warp-level matrix products and loads of their operands (PTX ISA, "ldmatrix", "mma.m16n8k16": sm_80 and up;
// "mma.m16n8k32" on E4M3: sm_89 and up). E4M3 is native on Ada (QMMA); on Hopper the compiler converts to half.
#pragma once

namespace greenfast::ptx {

// Loads four 8x8 tiles of 16-bit elements; lanes 8i .. 8i + 7 hold the 16-byte aligned row addresses of tile i.
__device__ __forceinline__ void ldmatrix_x4(unsigned (&r)[4], const void* smem_row) {
  const unsigned src = static_cast<unsigned>(__cvta_generic_to_shared(smem_row));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(src)
               : "memory");
}

// The same, with each 8x8 tile transposed.
__device__ __forceinline__ void ldmatrix_x4_trans(unsigned (&r)[4], const void* smem_row) {
  const unsigned src = static_cast<unsigned>(__cvta_generic_to_shared(smem_row));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(src)
               : "memory");
}

// Stores four such tiles; r[i] is the lane's part of tile i (sm_90 and up).
__device__ __forceinline__ void stmatrix_x4(void* smem_row, const unsigned (&r)[4]) {
  const unsigned dst = static_cast<unsigned>(__cvta_generic_to_shared(smem_row));
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(dst), "r"(r[0]), "r"(r[1]),
               "r"(r[2]), "r"(r[3])
               : "memory");
}

// The same, with each 8x8 tile transposed.
__device__ __forceinline__ void stmatrix_x4_trans(void* smem_row, const unsigned (&r)[4]) {
  const unsigned dst = static_cast<unsigned>(__cvta_generic_to_shared(smem_row));
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(dst), "r"(r[0]),
               "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}

// c += a * b of one instruction; the accumulators have constraint "+f" or "+r".
#define GF_MMA(instruction, accumulator, c, a, b0, b1)                                                            \
  asm volatile("mma.sync.aligned." instruction " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};" \
               : accumulator(c[0]), accumulator(c[1]), accumulator(c[2]), accumulator(c[3])                       \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1))

// c (16x8, fp32) += a (16x16, half, row-major) * b (16x8, half, column-major).
__device__ __forceinline__ void mma_m16n8k16(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  GF_MMA("m16n8k16.row.col.f32.f16.f16.f32", "+f", c, a, b0, b1);
}

// The same for bfloat16.
__device__ __forceinline__ void mma_m16n8k16_bf16(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  GF_MMA("m16n8k16.row.col.f32.bf16.bf16.f32", "+f", c, a, b0, b1);
}

// c (16x8, fp32) += a (16x32, E4M3, row-major) * b (32x8, E4M3, column-major). Lane l has, of a, rows l / 4 and l / 4 +
// 8, columns 4 (l % 4) .. + 3 and those 16 further on; of b, the same k in column l / 4; of c, columns 2 (l % 4), + 1.
__device__ __forceinline__ void mma_m16n8k32(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  GF_MMA("m16n8k32.row.col.f32.e4m3.e4m3.f32", "+f", c, a, b0, b1);
}

// The same for int8, exact.
__device__ __forceinline__ void mma_m16n8k32(int (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  GF_MMA("m16n8k32.row.col.s32.s8.s8.s32", "+r", c, a, b0, b1);
}

#undef GF_MMA

}  // namespace greenfast::ptx

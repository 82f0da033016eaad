// The mma of each 16-bit input type.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "ptx/mma.cuh"

namespace greenfast::ptx {

// add: c (16x8, fp32) += a (16x16 or 16x8, row-major) * b (16x8 or 8x8, column-major); set: c = a * b. inverse_power:
// 2^-exponent, twice.
template <class In>
struct InputMma;

template <>
struct InputMma<half> {
  __device__ static constexpr unsigned inverse_power(unsigned exponent) { return (15 - exponent) * 0x04000400u; }
  __device__ __forceinline__ static void add(float (&c)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
    mma_m16n8k16(c, a, b[0], b[1]);
  }
  __device__ __forceinline__ static void add(float (&c)[4], unsigned a0, unsigned a1, unsigned b) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(b));
  }
  __device__ __forceinline__ static void set(float (&c)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%10, %10, %10, %10};"
        : "=f"(c[0]), "=f"(c[1]), "=f"(c[2]), "=f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "f"(0.0f));
  }
};

template <>
struct InputMma<__nv_bfloat16> {
  __device__ static constexpr unsigned inverse_power(unsigned exponent) { return (127 - exponent) * 0x00800080u; }
  __device__ __forceinline__ static void add(float (&c)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
    mma_m16n8k16_bf16(c, a, b[0], b[1]);
  }
  __device__ __forceinline__ static void add(float (&c)[4], unsigned a0, unsigned a1, unsigned b) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(b));
  }
  __device__ __forceinline__ static void set(float (&c)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%10, %10, %10, %10};"
        : "=f"(c[0]), "=f"(c[1]), "=f"(c[2]), "=f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "f"(0.0f));
  }
};

}  // namespace greenfast::ptx

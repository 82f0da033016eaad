// The 8-bit formats and their exact conversion to half. Scales are applied elsewhere. Every value of either format is
// exact in half (E4M3: |x| <= 448 with 4 significant bits; int8: |x| <= 128).
#pragma once

#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include "ptx/e4m3.cuh"
#include "ptx/s8.cuh"

namespace greenfast {

enum class Format { kE4M3, kInt8 };

template <Format kFormat>
struct Codec;

template <>
struct Codec<Format::kE4M3> {
  // Four codes, lowest byte first, to four halves.
  static __device__ __forceinline__ void to_half4(unsigned codes, half2* out) {
    out[0] = half2(__nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(codes & 0xffffu), __NV_E4M3));
    out[1] = half2(__nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(codes >> 16), __NV_E4M3));
  }
};

template <>
struct Codec<Format::kInt8> {
  static __device__ __forceinline__ void to_half4(unsigned codes, half2* out) {
    // Flipping the sign bit makes b + 128 of each code b; under the exponent byte 0x64 that byte reads as the half
    // 1024 + (b + 128), so one exact subtraction of 1152 leaves b. No int-to-float conversion is needed.
    const unsigned biased = codes ^ 0x80808080u;
    const half2 offset = __float2half2_rn(1152.0f);
    const unsigned lo = __byte_perm(biased, 0x64646464u, 0x4140);
    const unsigned hi = __byte_perm(biased, 0x64646464u, 0x4342);
    out[0] = __hsub2(reinterpret_cast<const half2&>(lo), offset);
    out[1] = __hsub2(reinterpret_cast<const half2&>(hi), offset);
  }
};

// Rounds to nearest even, and saturates at the format's largest magnitude.
template <Format kFormat>
__device__ __forceinline__ unsigned char encode(float x) {
  if constexpr (kFormat == Format::kE4M3) {
    return __nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E4M3);
  } else {
    return static_cast<unsigned char>(static_cast<signed char>(max(-127, min(127, __float2int_rn(x)))));
  }
}

// Converts four values, x[0] to the lowest byte.
template <Format kFormat>
__device__ __forceinline__ unsigned encode_four(const float (&x)[4]) {
  if constexpr (kFormat == Format::kE4M3) {
    return ptx::pack_e4m3(x);
  } else {
    int whole[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) whole[i] = max(-127, __float2int_rn(x[i]));
    return ptx::pack_s8(whole);
  }
}

// Dequantization by conversion instructions.
template <Format kFormat>
struct ConvertDequantizer {
  static __device__ __forceinline__ void to_half4(unsigned codes, half2* out) { Codec<kFormat>::to_half4(codes, out); }
  __device__ explicit ConvertDequantizer(const half*) {}
};

// Dequantization by a 256-entry table of halves in shared memory (USE_KV_LUT).
template <Format kFormat>
struct LutDequantizer {
  const half* table;

  __device__ explicit LutDequantizer(const half* table) : table(table) {}

  __device__ __forceinline__ void to_half4(unsigned codes, half2* out) const {
    out[0] = __halves2half2(table[codes & 0xff], table[(codes >> 8) & 0xff]);
    out[1] = __halves2half2(table[(codes >> 16) & 0xff], table[codes >> 24]);
  }

  // Fills the table with all threads of the block; the caller synchronizes.
  static __device__ void fill(half* table) {
    for (unsigned code = threadIdx.x; code < 256; code += blockDim.x) {
      half2 two[2];
      Codec<kFormat>::to_half4(code, two);
      table[code] = __low2half(two[0]);
    }
  }
};

// Dequantizes 16 codes to 16 halves in shared memory. lo and hi take eight halves each and are 16-byte aligned.
template <class Dequantizer>
__device__ __forceinline__ void dequantize_16(const Dequantizer& dequantizer, const uint4& codes, half* lo, half* hi) {
  const unsigned words[4] = {codes.x, codes.y, codes.z, codes.w};
  alignas(16) half2 out[8];
#pragma unroll
  for (int i = 0; i < 4; ++i) dequantizer.to_half4(words[i], out + 2 * i);
  *reinterpret_cast<uint4*>(lo) = reinterpret_cast<const uint4&>(out[0]);
  *reinterpret_cast<uint4*>(hi) = reinterpret_cast<const uint4&>(out[4]);
}

}  // namespace greenfast

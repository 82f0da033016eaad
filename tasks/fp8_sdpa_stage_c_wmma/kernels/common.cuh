// What all rungs share: their arguments, and the conversion of 8-bit codes to half.
#pragma once

#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include "common/formats.cuh"

namespace greenfast {

struct LadderParams {
  const unsigned char* q;  // (batch x heads, seq_len, head_dim), quantized; also k and v
  const unsigned char* k;
  const unsigned char* v;
  const float* q_scale;  // (batch x heads); also k_scale and v_scale
  const float* k_scale;
  const float* v_scale;
  half* out;  // (batch x heads, seq_len, head_dim)
  int seq_len;
  float softmax_scale;
  long long* phase_cycles;  // (blocks, phases) in an instrumented build, else null
};

// The exact conversion of codes to half. Every value of either format is exact in half (E4M3: |x| <= 448 with 4
// significant bits; int8: |x| <= 128). Scales are applied elsewhere.
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

}  // namespace greenfast

// The 8-bit formats, and the conversion to them. Scales are applied elsewhere.
#pragma once

#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include "ptx/e4m3.cuh"
#include "ptx/s8.cuh"

namespace greenfast {

enum class Format { kE4M3, kInt8 };

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

}  // namespace greenfast

// Quantizes to FP8 or int8 with one scale per head: amax over the head, then the cast.
#pragma once

#include <cuda_fp16.h>

#include "common/bytes.cuh"
#include "common/formats.cuh"

namespace greenfast {

// x: (heads, elements) halves; codes: the same shape in bytes; scale: (heads). Grid: heads. Block: Cfg::kThreads.
// `elements` is a multiple of Cfg::kVector, and x is aligned to as many halves.
template <class Cfg>
__device__ void quantize_heads(const half* x, unsigned char* codes, float* scale, int elements) {
  constexpr float kCodeMax = Cfg::kFormat == Format::kE4M3 ? 448.0f : 127.0f;
  constexpr float kAmaxFloor = 1e-12f;
  constexpr int kWarps = Cfg::kThreads / 32;
  static_assert(kWarps * 32 == Cfg::kThreads && kWarps <= 32, "the block's warps are reduced by one warp");
  __shared__ float warp_amax[kWarps];

  using Halves = Pack<half, Cfg::kVector>;
  using Bytes = Pack<unsigned char, Cfg::kVector>;
  const size_t head_offset = static_cast<size_t>(blockIdx.x) * elements;
  const Halves* src = reinterpret_cast<const Halves*>(x + head_offset);
  Bytes* dst = reinterpret_cast<Bytes*>(codes + head_offset);
  const int packs = elements / Cfg::kVector;

  float amax = 0.0f;
  for (int i = threadIdx.x; i < packs; i += Cfg::kThreads) {
    const Halves pack = src[i];
#pragma unroll
    for (int j = 0; j < Cfg::kVector; ++j) amax = fmaxf(amax, fabsf(__half2float(pack.values[j])));
  }
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) amax = fmaxf(amax, __shfl_xor_sync(0xffffffffu, amax, lanes));
  if (threadIdx.x % 32 == 0) warp_amax[threadIdx.x / 32] = amax;
  __syncthreads();
  for (int warp = 0; warp < kWarps; ++warp) amax = fmaxf(amax, warp_amax[warp]);

  const float head_scale = amax > kAmaxFloor ? __fdiv_rn(amax, kCodeMax) : 1.0f;
  if (threadIdx.x == 0) scale[blockIdx.x] = head_scale;
  for (int i = threadIdx.x; i < packs; i += Cfg::kThreads) {
    const Halves pack = src[i];
    Bytes out;
#pragma unroll
    for (int j = 0; j < Cfg::kVector; ++j) {
      out.values[j] = encode<Cfg::kFormat>(__fdiv_rn(__half2float(pack.values[j]), head_scale));
    }
    dst[i] = out;
  }
}

}  // namespace greenfast

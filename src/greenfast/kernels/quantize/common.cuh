// What the parts of the quantizer share: how inputs are read, scales chosen and values cast.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <math_constants.h>

#include "common/bytes.cuh"
#include "common/formats.cuh"
#include "common/scale_blocks.cuh"
#include "ptx/math.cuh"

namespace greenfast {

struct QuantizeInput {
  const void* data;
  long long batch_stride, head_stride, row_stride;  // in elements; columns are neighbours
};

constexpr int kVector = 8;      // columns that a thread reads at once

// One head of a tensor.
template <class Cfg>
struct HeadRows {
  using Loaded = Pack<typename Cfg::In, kVector>;

  const typename Cfg::In* rows;
  long long row_stride;
  int length;

  __device__ __forceinline__ HeadRows(const QuantizeInput& input, int batch, int head, int length)
      : rows(static_cast<const typename Cfg::In*>(input.data) + batch * input.batch_stride + head * input.head_stride),
        row_stride(input.row_stride), length(length) {}

  // Eight columns of a row, zeros where there are none.
  __device__ __forceinline__ Loaded load(int row, int column) const {
    Loaded x = {};
    if (row < length && column < Cfg::kColumns) x = *reinterpret_cast<const Loaded*>(rows + row * row_stride + column);
    return x;
  }

  // Has the 64 columns from `column` on brought to the L2 cache.
  __device__ __forceinline__ void prefetch(int row, int column) const {
    if (row < length && column < Cfg::kColumns) {
      asm volatile("prefetch.global.L2 [%0];" ::"l"(rows + row * row_stride + column));
    }
  }
};

// The scale of numbers of which `amax`, times `factor`, is the largest magnitude. NaN where that is not finite: their
// codes are then to be 0. It has a finite inverse, also over a factor of up to 32.
__device__ __forceinline__ float scale_of(float amax, float code_max, float factor = 1.0f) {
  constexpr float kLeast = 1.88079096e-37f;  // 2^-122
  if (amax == 0.0f) return 1.0f;
  return amax < CUDART_INF_F ? fmaxf(__fdiv_rn(amax, code_max) * factor, kLeast) : CUDART_NAN_F;
}

// x / scale rounded to nearest, as IEEE division has it, by two corrections of a product (Markstein, 1990): `inverse`
// is 1 / scale rounded to nearest.
__device__ __forceinline__ float divide(float x, float scale, float inverse) {
  const float quotient = x * inverse;
  return __fmaf_rn(__fmaf_rn(-quotient, scale, x), inverse, quotient);
}

// Of two pairs of 16-bit numbers the larger magnitudes, as pairs without signs: these are ordered as integers are, NaN
// last.
__device__ __forceinline__ unsigned largest_pair(unsigned magnitudes, unsigned pair) {
  return ptx::max_u16x2(magnitudes, pair & 0x7fff7fffu);
}

// The larger of a pair of magnitudes, NaN where there is one.
template <class In>
__device__ __forceinline__ float larger(unsigned magnitudes) {
  const Pack<In, 2>& pair = reinterpret_cast<const Pack<In, 2>&>(magnitudes);
  return ptx::max_nan(static_cast<float>(pair.values[0]), static_cast<float>(pair.values[1]));
}

// The largest of the warp's values.
__device__ __forceinline__ float over_warp(float amax) {
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) amax = ptx::max_nan(amax, __shfl_xor_sync(0xffffffffu, amax, lanes));
  return amax;
}

// The largest of the values of the four lanes that hold a row.
__device__ __forceinline__ float over_quad(float amax) {
#pragma unroll
  for (int lanes = 2; lanes > 0; lanes /= 2) amax = ptx::max_nan(amax, __shfl_xor_sync(0xffffffffu, amax, lanes));
  return amax;
}

// The largest of the block's values; `shared` has a place for each warp.
template <int kThreads>
__device__ __forceinline__ float over_block(float* shared, float amax) {
  amax = over_warp(amax);
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = amax;
  __syncthreads();
  amax = shared[0];
#pragma unroll
  for (int warp = 1; warp < kThreads / 32; ++warp) amax = ptx::max_nan(amax, shared[warp]);
  return amax;
}

}  // namespace greenfast

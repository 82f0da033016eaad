// Shared by the parts of the quantizer: loads of inputs, choice of scales, casts.
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
  long long batch_stride, head_stride, row_stride;  // in elements; columns are contiguous
};

constexpr int kVector = 8;  // columns per vector load

// With kParts: the second tensor of HeadRows, and the rows of the first one, 0 to length.
template <class Cfg, bool kUsed = Cfg::kParts>
struct SecondRows {
  static constexpr int boundary = 0;
};
template <class Cfg>
struct SecondRows<Cfg, true> {
  const typename Cfg::In* second_rows;
  long long second_stride;
  int boundary;

  __device__ __forceinline__ void set_second(const QuantizeInput& input, int batch, int head, int first_rows) {
    second_rows =
        static_cast<const typename Cfg::In*>(input.data) + batch * input.batch_stride + head * input.head_stride;
    second_stride = input.row_stride;
    boundary = first_rows;
  }
};

// One head of a tensor. With kParts it is one head of two tensors, first all rows of the first, then the second's.
template <class Cfg>
struct HeadRows : SecondRows<Cfg> {
  using Loaded = Pack<typename Cfg::In, kVector>;

  const typename Cfg::In* rows;
  long long row_stride;
  int length;
  const int* places;  // (length), with kGathered: the rows to take, in order

  __device__ __forceinline__ HeadRows(const QuantizeInput& input, int batch, int head, int length)
      : rows(static_cast<const typename Cfg::In*>(input.data) + batch * input.batch_stride + head * input.head_stride),
        row_stride(input.row_stride),
        length(length) {}

  __device__ __forceinline__ const typename Cfg::In* address(int row, int column) const {
    if constexpr (Cfg::kGathered) row = places[row];
    if constexpr (Cfg::kParts) {
      if (row >= this->boundary) return this->second_rows + (row - this->boundary) * this->second_stride + column;
    }
    return rows + row * row_stride + column;
  }

  // Loads eight columns of a row; zeros outside the tensor.
  __device__ __forceinline__ Loaded load(int row, int column) const {
    Loaded x = {};
    if (row < length && column < Cfg::kColumns) x = *reinterpret_cast<const Loaded*>(address(row, column));
    return x;
  }

  // Prefetches the 64 columns from `column` on to L2.
  __device__ __forceinline__ void prefetch(int row, int column) const {
    if (row < length && column < Cfg::kColumns) {
      asm volatile("prefetch.global.L2 [%0];" ::"l"(address(row, column)));
    }
  }
};

// The scale for values with largest magnitude amax * factor: at least 2^-122, and 1 if amax is 0. NaN if amax is not
// finite; the codes must then be 0. Its inverse is finite, even divided by a factor of up to 32.
__device__ __forceinline__ float scale_of(float amax, float code_max, float factor = 1.0f) {
  constexpr float kMinScale = 1.88079096e-37f;  // 2^-122
  if (amax == 0.0f) return 1.0f;
  return amax < CUDART_INF_F ? fmaxf(__fdiv_rn(amax, code_max) * factor, kMinScale) : CUDART_NAN_F;
}

// x / scale, correctly rounded like IEEE division, by two corrections of a product (Markstein, 1990). inverse: 1 /
// scale rounded to nearest.
__device__ __forceinline__ float divide(float x, float scale, float inverse) {
  const float quotient = x * inverse;
  return __fmaf_rn(__fmaf_rn(-quotient, scale, x), inverse, quotient);
}

// Elementwise maximum of magnitudes of two pairs of 16-bit floats. Without sign they compare as integers; NaN is the
// largest.
__device__ __forceinline__ unsigned max_abs_pair(unsigned magnitudes, unsigned pair) {
  return ptx::max_u16x2(magnitudes, pair & 0x7fff7fffu);
}

// The maximum of a pair; NaN if one is NaN.
template <class In>
__device__ __forceinline__ float max_of_pair(unsigned magnitudes) {
  const Pack<In, 2>& pair = reinterpret_cast<const Pack<In, 2>&>(magnitudes);
  return ptx::max_nan(static_cast<float>(pair.values[0]), static_cast<float>(pair.values[1]));
}

// Maximum over the warp; NaN if one is NaN.
__device__ __forceinline__ float warp_max_nan(float amax) {
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) amax = ptx::max_nan(amax, __shfl_xor_sync(0xffffffffu, amax, lanes));
  return amax;
}

// Maximum over the four lanes that hold a row; NaN if one is NaN.
__device__ __forceinline__ float quad_max_nan(float amax) {
#pragma unroll
  for (int lanes = 2; lanes > 0; lanes /= 2) amax = ptx::max_nan(amax, __shfl_xor_sync(0xffffffffu, amax, lanes));
  return amax;
}

// Maximum over the block; NaN if one is NaN. shared: one element per warp. Contains __syncthreads().
template <int kThreads>
__device__ __forceinline__ float block_max_nan(float* shared, float amax) {
  amax = warp_max_nan(amax);
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = amax;
  __syncthreads();
  amax = shared[0];
#pragma unroll
  for (int warp = 1; warp < kThreads / 32; ++warp) amax = ptx::max_nan(amax, shared[warp]);
  return amax;
}

}  // namespace greenfast

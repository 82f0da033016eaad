// The moments of the rows of Q and K over all heads, for the norm in rows_prologue.cuh.
#pragma once

#include "quantize/common.cuh"

namespace greenfast {

struct RowNormsParams {
  QuantizeInput q, k;
  // (batch, length): the inverse root mean square. With kCentered pairs: the mean, the inverse standard deviation.
  float *q_moments, *k_moments;
  float eps;
  int batch, heads, kv_heads, q_len, kv_len;
};

// A warp per row. Grid: enough for the rows of Q, then of K. Block: any whole warps. Cfg: kColumns, In, kCentered,
// kGathered, kParts.
template <class Cfg>
__device__ __forceinline__ void compute_row_norms(const RowNormsParams& p) {
  using Loaded = typename HeadRows<Cfg>::Loaded;
  constexpr int kChunks = Cfg::kColumns / kVector;  // per head
  int row = (blockIdx.x * blockDim.x + threadIdx.x) / 32;
  const bool of_q = row < p.batch * p.q_len;
  if (!of_q) row -= p.batch * p.q_len;
  const int length = of_q ? p.q_len : p.kv_len, heads = of_q ? p.heads : p.kv_heads;
  if (row >= p.batch * length) return;
  const QuantizeInput& input = of_q ? p.q : p.k;
  const auto* from = static_cast<const typename Cfg::In*>(input.data) + row / length * input.batch_stride +
                     row % length * input.row_stride;
  float mean = 0.0f;
  if constexpr (Cfg::kCentered) {
    // A power of two that is at most the inverse of the number of terms, so that no sum overflows.
    const int count = heads * Cfg::kColumns, exponent = 32 - __clz(count - 1);
    const float factor = __uint_as_float(127 - exponent << 23);
    for (int i = threadIdx.x % 32; i < heads * kChunks; i += 32) {
      const Loaded x = *reinterpret_cast<const Loaded*>(from + i / kChunks * input.head_stride + i % kChunks * kVector);
#pragma unroll
      for (int c = 0; c < kVector; ++c) mean = __fmaf_rn(static_cast<float>(x.values[c]), factor, mean);
    }
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes /= 2) mean += __shfl_xor_sync(0xffffffffu, mean, lanes);
    mean = __fdiv_rn(mean, factor * static_cast<float>(count));
  }
  float sum = 0.0f;
#pragma unroll 4
  for (int i = threadIdx.x % 32; i < heads * kChunks; i += 32) {
    const Loaded x = *reinterpret_cast<const Loaded*>(from + i / kChunks * input.head_stride + i % kChunks * kVector);
#pragma unroll
    for (int c = 0; c < kVector; ++c) {
      const float value = static_cast<float>(x.values[c]), deviation = Cfg::kCentered ? __fsub_rn(value, mean) : value;
      sum = __fmaf_rn(deviation, deviation, sum);
    }
  }
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, lanes);
  if (threadIdx.x % 32 == 0) {
    const float mean_square = __fdiv_rn(sum, static_cast<float>(heads * Cfg::kColumns));
    const float inverse = __frcp_rn(__fsqrt_rn(__fadd_rn(mean_square, p.eps)));
    float* const moments = of_q ? p.q_moments : p.k_moments;
    if constexpr (Cfg::kCentered) {
      reinterpret_cast<float2*>(moments)[row] = make_float2(mean, inverse);
    } else {
      moments[row] = inverse;
    }
  }
}

}  // namespace greenfast

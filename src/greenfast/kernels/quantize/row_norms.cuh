// The inverse root mean squares of the rows of Q and K over all heads, for the norm in rows_prologue.cuh.
#pragma once

#include "quantize/common.cuh"

namespace greenfast {

struct RowNormsParams {
  QuantizeInput q, k;
  float *q_inverse, *k_inverse;  // (batch, length)
  float eps;
  int batch, heads, kv_heads, q_len, kv_len;
};

// A warp per row. Grid: enough for the rows of Q, then of K. Block: any whole warps. Cfg: kColumns, In, kGathered, kParts.
template <class Cfg>
__device__ __forceinline__ void compute_row_norms(const RowNormsParams& p) {
  constexpr int kChunks = Cfg::kColumns / kVector;  // per head
  int row = (blockIdx.x * blockDim.x + threadIdx.x) / 32;
  const bool of_q = row < p.batch * p.q_len;
  if (!of_q) row -= p.batch * p.q_len;
  const int length = of_q ? p.q_len : p.kv_len, heads = of_q ? p.heads : p.kv_heads;
  if (row >= p.batch * length) return;
  const QuantizeInput& input = of_q ? p.q : p.k;
  const auto* from = static_cast<const typename Cfg::In*>(input.data) + row / length * input.batch_stride +
                     row % length * input.row_stride;
  float sum = 0.0f;
#pragma unroll 4
  for (int i = threadIdx.x % 32; i < heads * kChunks; i += 32) {
    const auto x = *reinterpret_cast<const typename HeadRows<Cfg>::Loaded*>(from + i / kChunks * input.head_stride +
                                                                            i % kChunks * kVector);
#pragma unroll
    for (int c = 0; c < kVector; ++c) {
      const float value = static_cast<float>(x.values[c]);
      sum = __fmaf_rn(value, value, sum);
    }
  }
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, lanes);
  if (threadIdx.x % 32 == 0) {
    const float mean = __fdiv_rn(sum, static_cast<float>(heads * Cfg::kColumns));
    (of_q ? p.q_inverse : p.k_inverse)[row] = __frcp_rn(__fsqrt_rn(__fadd_rn(mean, p.eps)));
  }
}

}  // namespace greenfast

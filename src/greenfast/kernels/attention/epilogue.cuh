// Axis: the epilogue. Writes O and LSE from the accumulators and row sums.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <math_constants.h>

#include "attention/nonfinite.cuh"
#include "attention/softmax.cuh"
#include "attention/v_scale.cuh"
#include "ptx/griddepcontrol.cuh"
#include "ptx/store.cuh"

namespace greenfast {

// Transposes a 4x4 matrix over the lanes of a quad: afterwards x[i] is lane i's former x[own lane].
__device__ __forceinline__ void transpose_quad(unsigned (&x)[4]) {
  const bool odd = threadIdx.x & 1, high = threadIdx.x & 2;
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    const unsigned received = __shfl_xor_sync(0xffffffffu, odd ? x[i] : x[i + 1], 1);
    (odd ? x[i] : x[i + 1]) = received;
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const unsigned received = __shfl_xor_sync(0xffffffffu, high ? x[i] : x[i + 2], 2);
    (high ? x[i] : x[i + 2]) = received;
  }
}

// Packs two adjacent columns of O.
__device__ __forceinline__ unsigned pack_out(float low, float high, half*) {
  const half2 pair = __floats2half2_rn(low, high);
  return reinterpret_cast<const unsigned&>(pair);
}
__device__ __forceinline__ unsigned pack_out(float low, float high, __nv_bfloat16*) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return reinterpret_cast<const unsigned&>(pair);
}

// The epilogue of a consumer warpgroup after its last tile. A thread has columns 8 j + 2 (t % 4) and the next one, for
// all j, of each of its two rows. The compiler orders the stores by the way head and rows are passed: pass numbers, not
// a Sequence.
template <class Traits>
struct Epilogue {
  static constexpr int kOut = Traits::kHeadDim / 2;  // values of O; row sums follow with kRowSumByMma

  // Writes O / sum and LSE of the rows first_row .. stop_row - 1 of the output. Rows that attend to non-finite keys
  // become NaN. mainloop: provides p, o (overwritten), the V scale of o, and the softmax state. head, kv_head: counted
  // over the batch.
  template <class Mainloop>
  __device__ __forceinline__ static void store(Mainloop& mainloop, int head, int first_row, int stop_row, int kv_head,
                                               const NonFiniteRows& nonfinite) {
    const FlashParams& p = mainloop.p;
    auto& o = mainloop.o;
    const auto& softmax = mainloop.softmax;
    using Out = typename Traits::Out;
    const int quad = threadIdx.x % 4;
    Out* const begin = static_cast<Out*>(p.out) + p.rows.first(head);
    const float* channels = p.v_scale + (Traits::kChannelScales ? kv_head * Traits::kHeadDim : 0);
    float acc_scale = mainloop.v_scale.last(p, kv_head);
    [[maybe_unused]] const float sink = Traits::kSinks ? p.sinks[static_cast<unsigned>(head) % p.rows.heads] : 0.0f;
    if (acc_scale < 1e-20f) {  // acc_scale / total could be subnormal
#pragma unroll
      for (int i = 0; i < kOut; ++i) o[i] *= acc_scale;
      acc_scale = 1.0f;
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float total = Traits::kRowSumByMma ? o[kOut + 2 * r] : softmax.sum[r];
      if (!Traits::kRowSumByMma) {
        total += __shfl_xor_sync(0xffffffffu, total, 1);
        total += __shfl_xor_sync(0xffffffffu, total, 2);
      }
      const bool any = total >= 1.0f;  // a row with a key has a P of 448
      [[maybe_unused]] float sink_shift = 0.0f;
      float numerator = acc_scale;
      if constexpr (Traits::kSinks) {
        // The sink's weight, in the units of P. A large one makes P small instead of becoming infinite.
        constexpr float kMaxWeight = 64.0f;  // as an exponent
        const float exponent = sink * 1.4426950408889634f - softmax.base[r] + OnlineSoftmax<Traits>::kMaxOffset;
        sink_shift = fmaxf(0.0f, exponent - kMaxWeight);
        const float smaller = ptx::ex2(-sink_shift);
        if (any) {
          total = total * smaller + ptx::ex2(exponent - sink_shift);
          numerator *= smaller;
        }
      }
      const float factor = nonfinite.scores[r] || nonfinite.values[r] ? CUDART_NAN_F : any ? numerator / total : 0.0f;
      const int row = first_row + threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4 + 8 * r;
      Out* const out = begin + row * p.rows.row;
#pragma unroll
      for (int j = 0; j < Traits::kHeadDim / 8; j += 4) {
        unsigned x[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          float low = o[4 * (j + i) + 2 * r] * factor, high = o[4 * (j + i) + 2 * r + 1] * factor;
          if constexpr (Traits::kChannelScales) {
            const float2 scales = __ldg(reinterpret_cast<const float2*>(channels + 8 * (j + i) + 2 * quad));
            low *= scales.x;
            high *= scales.y;
          }
          x[i] = pack_out(low, high, static_cast<Out*>(nullptr));
        }
        transpose_quad(x);
        const int column = 8 * (j + quad);
        if (row < stop_row && (!Traits::kFewerColumns || column < p.rows.columns)) {
          ptx::store_16(out + column, x);
        }
      }
      if (Traits::kLse && quad == 0 && row < stop_row) {
        const float ln2 = 0.6931471805599453f;
        float lse = any ? (log2f(total) - OnlineSoftmax<Traits>::kMaxOffset + softmax.base[r]) * ln2 : -CUDART_INF_F;
        if constexpr (Traits::kSinks) lse = any ? lse + sink_shift * ln2 : sink;
        lse = nonfinite.scores[r] ? CUDART_NAN_F : lse;
        const size_t index = static_cast<size_t>(head) * p.q_len + row;
        if constexpr (Traits::kScoreMax) {
          reinterpret_cast<float2*>(p.lse)[index] = make_float2(lse, softmax.top[r] * ln2);
        } else {
          p.lse[index] = lse;
        }
      }
    }
  }
};

}  // namespace greenfast

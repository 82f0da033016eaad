// Axis: the epilogue. From sums of weights and weighted values to O and the log-sum-exp in memory.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <math_constants.h>

#include "attention/mask.cuh"
#include "attention/softmax.cuh"
#include "attention/value_units.cuh"
#include "ptx/griddepcontrol.cuh"
#include "ptx/store.cuh"

namespace greenfast {

// Exchanges registers among the four lanes of a quad: afterwards x[i] is what lane i of the quad had in x[own lane].
__device__ __forceinline__ void transpose_quad(unsigned (&x)[4]) {
  const bool odd = threadIdx.x & 1, high = threadIdx.x & 2;
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    const unsigned got = __shfl_xor_sync(0xffffffffu, odd ? x[i] : x[i + 1], 1);
    (odd ? x[i] : x[i + 1]) = got;
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const unsigned got = __shfl_xor_sync(0xffffffffu, high ? x[i] : x[i + 2], 2);
    (high ? x[i] : x[i + 2]) = got;
  }
}

// Two neighbouring values of O as 32 bits.
__device__ __forceinline__ unsigned pack_out(float low, float high, half*) {
  const half2 pair = __floats2half2_rn(low, high);
  return reinterpret_cast<const unsigned&>(pair);
}
__device__ __forceinline__ unsigned pack_out(float low, float high, __nv_bfloat16*) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return reinterpret_cast<const unsigned&>(pair);
}

// Which of a thread's two rows attend to keys, or values, that are not all finite.
struct UnknownRows {
  bool scores[2], values[2];
};

// Finds them, for the 64 rows of a warpgroup from first_row on. A thread has rows t / 4 and t / 4 + 8 of its warp's 16
// (t: its lane).
template <class Traits>
struct UnknownRowsFinder {
  const FlashParams& p;
  const Sequence& sequence;
  const KeyRows& keys;
  const int first_row;

  // The first of the thread's two rows.
  __device__ __forceinline__ int row() const { return first_row + threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4; }

  // Which of this thread's two rows attend to a block of keys or values whose scale is NaN: a quantizer leaves that,
  // and codes of 0, where a number of the block is not finite, so that nothing of it reaches other rows. A NaN in
  // scores would not do: the powers of two from the bits of halves lose it. All groups of a block are NaN where one is.
  __device__ __forceinline__ UnknownRows find(const ScoreScales<Traits>& scales) const {
    const typename Traits::Mask mask{sequence};
    const auto end = [&](int of) { return max(0, mask.row_end(of)); };
    const int seen = end(first_row + Traits::kRows - 1);
    int known_keys = seen, known_values = seen;  // up to which all is known
    if constexpr (Traits::kKeyBlockScales) {
      const size_t first = sequence.first_kv_block(keys);
      for (int block = threadIdx.x % 32; block * kRowBlock < seen; block += 32) {
        const float of_keys = ptx::load_written(p.k_scale + (first + block) * (Traits::kFineScales ? kKeyGroups : 1));
        const float of_values = Traits::kValueBlockScales ? ptx::load_written(p.v_scale + first + block) : 0.0f;
        if (of_keys != of_keys) known_keys = min(known_keys, block * kRowBlock);
        if (of_values != of_values) known_values = min(known_values, block * kRowBlock);
      }
      known_keys = __reduce_min_sync(0xffffffffu, known_keys);
      known_values = __reduce_min_sync(0xffffffffu, known_values);
    }
    UnknownRows unknown;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float of_row = scales.row_factor(r);
      unknown.scores[r] = end(row() + 8 * r) > (of_row != of_row ? 0 : known_keys);
      unknown.values[r] = end(row() + 8 * r) > known_values;
    }
    return unknown;
  }

};

// What a warpgroup does once its rows have met all of their keys. Of each of its two rows a thread has columns
// 8 j + 2 (t % 4) and the next one, for all j. The compiler orders the stores by how they reach head and rows: as
// numbers, not through a Sequence, so varlen offsets come here as well.
template <class Traits>
struct Epilogue {
  static constexpr int kOut = Traits::kHeadDim / 2;  // values of O, behind which sums come where kSumsByProduct

  // Writes the rows before q_len: O / sum, and the log-sum-exp. Rows that attend to what is unknown are NaN. mainloop:
  // p, o (overwritten), the units of o, and the softmax with its bases and sums. head and kv_head: over the batch.
  template <class Mainloop>
  __device__ __forceinline__ static void store(Mainloop& mainloop, int head, int first_row, int kv_head,
                                               const UnknownRows& unknown) {
    const FlashParams& p = mainloop.p;
    auto& o = mainloop.o;
    const auto& softmax = mainloop.softmax;
    using Out = typename Traits::Out;
    const int quad = threadIdx.x % 4;
    Out* const begin = static_cast<Out*>(p.out) + p.rows.first(head);
    const float* channels = p.v_scale + (Traits::kChannelScales ? kv_head * Traits::kHeadDim : 0);
    float unit = mainloop.units.last(p, kv_head);
    if (unit < 1e-20f) {  // its quotient by a sum could be subnormal
#pragma unroll
      for (int i = 0; i < kOut; ++i) o[i] *= unit;
      unit = 1.0f;
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float total = Traits::kSumsByProduct ? o[kOut + 2 * r] : softmax.sum[r];
      if (!Traits::kSumsByProduct) {
        total += __shfl_xor_sync(0xffffffffu, total, 1);
        total += __shfl_xor_sync(0xffffffffu, total, 2);
      }
      const bool any = total >= 1.0f;  // a row with a key has a weight of 448
      const float factor = unknown.scores[r] || unknown.values[r] ? CUDART_NAN_F : any ? unit / total : 0.0f;
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
        if (row < p.q_len && (!Traits::kFewerColumns || column < p.rows.columns)) {
          ptx::store_16(out + column, x);
        }
      }
      if (Traits::kLse && quad == 0 && row < p.q_len) {
        const float ln2 = 0.6931471805599453f;
        const float lse = any ? (log2f(total) - OnlineSoftmax<Traits>::kOffset + softmax.base[r]) * ln2 : -CUDART_INF_F;
        p.lse[static_cast<size_t>(head) * p.q_len + row] = unknown.scores[r] ? CUDART_NAN_F : lse;
      }
    }
  }
};

}  // namespace greenfast

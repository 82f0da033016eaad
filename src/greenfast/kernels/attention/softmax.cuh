// Online softmax of raw scores in registers (Milakov and Gimelshein, 2018), in base 2, and P as E4M3 operands.
//
// A thread has two rows of the scores and of O: register i belongs to row i / 2 % 2 of the two.
#pragma once

#include <math_constants.h>

#include "attention/variant.cuh"
#include "ptx/e4m3.cuh"
#include "ptx/math.cuh"

namespace greenfast {

// Traits: kBlockN, kExp2Emulated, kRowSumByMma, kPerTileBase, kSkip, kScoreMax.
template <class Traits>
struct OnlineSoftmax {
  using Scales = ScoreScales<Traits>;
  static constexpr int kScores = Traits::kBlockN / 2;  // per thread
  static constexpr int kSteps = Traits::kBlockN / 32;  // k-steps of P V
  static constexpr int kScales = Scales::kScales;
  static constexpr bool kTop = Traits::kSkip || Traits::kScoreMax;
  // The largest P of a tile is stored as 448 = 2^kMaxOffset, the largest E4M3 number, so that small values keep their
  // precision.
  static constexpr float kMaxOffset = 8.807355f;
  // With kPerTileBase this also holds if an earlier tile had a larger score: an attention sink would otherwise leave too
  // few bits for all later keys. The base drops by at most 2^kMaxBaseDrop per tile, and not if the row sum exceeds
  // kMaxSumForDrop. So the sum stays below 2^34, even if it does not include the last tile yet. A thread's own sum
  // covers a quarter of the columns.
  static constexpr float kMaxBaseDrop = 8.0f, kMaxSumForDrop = Traits::kRowSumByMma ? 262144.0f : 65536.0f;  // 2^18

  float base[2];  // the exponent of a score with P = 2^kMaxOffset, subtracted from all; -inf before the first key
  float sum[2];   // row sum over this thread's columns; unused with kRowSumByMma
  float top[2];   // with kTop: the row's largest score so far, at least `base`; -inf before the first key

  __device__ __forceinline__ void start() {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      base[r] = -CUDART_INF_F;
      sum[r] = 0.0f;
      if constexpr (kTop) top[r] = -CUDART_INF_F;
    }
  }

  // Returns this thread's part of the rows' largest scores in a tile.
  template <class Variant>
  __device__ __forceinline__ void thread_tops(const float (&s)[kScores], const Scales& scales, float (&row_max)[2]) {
#pragma unroll
    for (int h = 0; h < kScales; ++h) {
      float raw[2];
      thread_maxima<Variant>(s, h, raw);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float scaled = raw[r] * scales.factor(h, r);
        row_max[r] = h == 0 ? scaled : fmaxf(row_max[r], scaled);
      }
    }
  }

  // Returns whether this thread's part of a tile has no weight of at least 2^skip_log2, relative to the row's largest
  // so far. A row before its first key takes any key, and needs no tile without one.
  __device__ __forceinline__ bool can_skip(const float (&row_max)[2], float skip_log2) const {
    return row_max[0] < fmaxf(top[0] + skip_log2, -CUDART_MAX_NORMAL_F) &&
           row_max[1] < fmaxf(top[1] + skip_log2, -CUDART_MAX_NORMAL_F);
  }

  // Overwrites raw scores s and computes P; `pack` converts it to operands. Returns in `rescale` the factors for earlier
  // tiles. row_max: from thread_tops. before: the rows' sums so far, perhaps without the last tile.
  //
  // Of each 16 values the first kExp2Emulated are computed on the FMA pipe, as pairs of halves (ptx::exp2_halves). The
  // others use the special-function unit (MUFU), the bottleneck: 16 results per multiprocessor and clock.
  template <class Variant>
  __device__ __forceinline__ void online_softmax(float (&s)[kScores], const Scales& scales, float (&row_max)[2],
                                                 const float (&before)[2], float (&p_fp32)[kScores],
                                                 float (&rescale)[2]) {
    float bias[kScales][2], half_bias[kScales][2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      // Before the reduction over the quad: with per-thread sums, all threads of a row must drop together.
      row_max[r] =
          fmaxf(row_max[r], Traits::kPerTileBase && before[r] < kMaxSumForDrop ? base[r] - kMaxBaseDrop : base[r]);
      row_max[r] = fmaxf(row_max[r], __shfl_xor_sync(0xffffffffu, row_max[r], 1));
      row_max[r] = fmaxf(row_max[r], __shfl_xor_sync(0xffffffffu, row_max[r], 2));
      const float exponent_base =
          row_max[r] == -CUDART_INF_F ? 0.0f : row_max[r];  // no key so far: any base gives P = 0
      rescale[r] = ptx::ex2(base[r] - exponent_base);
#pragma unroll
      for (int h = 0; h < kScales; ++h) bias[h][r] = kMaxOffset - exponent_base;
      base[r] = row_max[r];
      if constexpr (kTop) top[r] = fmaxf(top[r], row_max[r]);  // an earlier base is at most `top`
      sum[r] *= rescale[r];
    }
    if constexpr (Variant::kShift != 0.0f) subtract_shift<Variant>(s, scales, bias);
#pragma unroll
    for (int i = 0; i < 2 * kScales; ++i) {
      half_bias[i / 2][i % 2] = fmaf(bias[i / 2][i % 2], ptx::kExp2HalfScale, ptx::kExp2HalfBias);
    }
#pragma unroll
    for (int i = 0; i < kScores; i += 2) {
      const int r = i / 2 % 2, h = i / (kScores / kScales);
      const float scale = scales.factor(h, r), low = s[i], high = s[i + 1];
      if (is_emulated(i)) {
        const float half_scale = scale * ptx::kExp2HalfScale;
        p_fp32[i] = __uint_as_float(
            ptx::exp2_halves(fmaf(low, half_scale, half_bias[h][r]), fmaf(high, half_scale, half_bias[h][r])));
      } else {
        p_fp32[i] = ptx::ex2(fmaf(low, scale, bias[h][r]));
        p_fp32[i + 1] = ptx::ex2(fmaf(high, scale, bias[h][r]));
        if (!Traits::kRowSumByMma) sum[r] += p_fp32[i] + p_fp32[i + 1];
      }
    }
  }

  // Converts P to A operands of P V.
  __device__ __forceinline__ static void pack(const float (&p_fp32)[kScores], unsigned (&p_frag)[kSteps][4]) {
#pragma unroll
    for (int t = 0; t < kSteps; ++t) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {  // row i % 2, columns from 16 (i / 2)
        const int first = 16 * t + 8 * (i / 2) + 2 * (i % 2), second = first + 4;
        if (is_emulated(first)) {
          p_frag[t][i] = ptx::pack_e4m3(__float_as_uint(p_fp32[first]), __float_as_uint(p_fp32[second]));
        } else {
          const float four[4] = {p_fp32[first], p_fp32[first + 1], p_fp32[second], p_fp32[second + 1]};
          p_frag[t][i] = ptx::pack_e4m3(four);
        }
      }
    }
  }

 private:
  // Whether P of register i comes from the FMA pipe. 16 values make the four registers of an A operand: registers 0, 1
  // and 4, 5 the first one, of row 0; 2, 3 and 6, 7 the second, of row 1; and so on.
  __device__ static constexpr bool is_emulated(int i) {
    return 8 * (i / 8 % 2) + 4 * (i / 2 % 2) < Traits::kExp2Emulated;
  }

  // Subtracts kShift from the raw scores by way of the biases, at no cost per score. The bias is then rounded at the
  // magnitude of kShift times the scale: all exponents of a tile are off by the same amount, up to 0.75 times the
  // scale. That is less than one unit of an integer score, while quantization errors are some hundred units. If it
  // exceeds 2^-8, the scores themselves are shifted, exactly.
  template <class Variant>
  __device__ __forceinline__ static void subtract_shift(float (&s)[kScores], const Scales& scales,
                                                        float (&bias)[kScales][2]) {
    constexpr float kShiftThreshold = 0.00520833f;
    float max_factor = 0.0f;
#pragma unroll
    for (int i = 0; i < 2 * kScales; ++i) max_factor = fmaxf(max_factor, scales.factor(i / 2, i % 2));
    if (Traits::kFineScales ? __any_sync(0xffffffffu, max_factor > kShiftThreshold) : max_factor > kShiftThreshold) {
#pragma unroll
      for (float& x : s) x -= Variant::kShift;
    } else {
#pragma unroll
      for (int i = 0; i < 2 * kScales; ++i) {
        float& row_bias = bias[i / 2][i % 2];
        row_bias = fmaf(-Variant::kShift, scales.factor(i / 2, i % 2), row_bias);
      }
    }
  }

  // Raw maxima of a thread's two rows over the scores of one K scale: if above the base or, with kPerTileBase, always.
  // Uses integer max on the float bits, three operands at a time and starting from 0. This is right for positive floats.
  // If the result is 0, all scores are negative: then the largest has the smallest bits.
  template <class Variant>
  __device__ __forceinline__ void thread_maxima(const float (&s)[kScores], int scale, float (&row_max)[2]) {
    constexpr int kCount = kScores / kScales;
    constexpr bool kShifted = Variant::kShift != 0.0f;  // all positive, except -inf
    int max_bits[2] = {};
    if (kShifted) max_bits[0] = max_bits[1] = 0xff800000;  // of -inf
#pragma unroll
    for (int i = scale * kCount; i < (scale + 1) * kCount; i += 2) {
      int& m = max_bits[i / 2 % 2];
      m = __vimax3_s32(m, __float_as_int(s[i]), __float_as_int(s[i + 1]));
    }
    row_max[0] = __int_as_float(max_bits[0]) - Variant::kShift;
    row_max[1] = __int_as_float(max_bits[1]) - Variant::kShift;
    if constexpr (kShifted) return;
    const bool always = Traits::kPerTileBase;
    if (__any_sync(0xffffffffu, (max_bits[0] == 0 && (always || base[0] < 0.0f)) ||
                                    (max_bits[1] == 0 && (always || base[1] < 0.0f)))) {
      unsigned min_bits[2] = {0xff800000u, 0xff800000u};  // of -inf
#pragma unroll
      for (int i = scale * kCount; i < (scale + 1) * kCount; i += 2) {
        unsigned& m = min_bits[i / 2 % 2];
        m = __vimin3_u32(m, __float_as_uint(s[i]), __float_as_uint(s[i + 1]));
      }
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        if (max_bits[r] == 0) row_max[r] = __uint_as_float(min_bits[r]);
      }
    }
  }
};

}  // namespace greenfast

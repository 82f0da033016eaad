// Online softmax of raw scores in registers (Milakov and Gimelshein, 2018), in base 2, and its weights as E4M3
// operands.
//
// Of scores and of O a thread has two rows: register i of either belongs to row i / 2 % 2 of the two.
#pragma once

#include <math_constants.h>

#include "attention/variant.cuh"
#include "ptx/e4m3.cuh"
#include "ptx/math.cuh"

namespace greenfast {

// Traits: kBlockN, kPolynomials, kSumsByProduct, kTileBase.
template <class Traits>
struct OnlineSoftmax {
  using Scales = ScoreScales<Traits>;
  static constexpr int kScores = Traits::kBlockN / 2;  // per thread
  static constexpr int kSteps = Traits::kBlockN / 32;  // of P V
  static constexpr int kScales = Scales::kScales;
  // A tile's largest weight is stored as 448 = 2^kOffset, E4M3's largest number, so that small ones keep their bits.
  static constexpr float kOffset = 8.807355f;
  // With kTileBase also where an earlier tile had larger ones, such as a sink that all rows attend to, whose own weight
  // would leave those of all later keys too few bits. The base falls by at most 2^kMostFall from tile to tile, and not
  // where the sum of weights is large, so that falls leave it below 2^34 even if the last one is not in it yet.
  // A thread's own sum is of a quarter of the columns.
  static constexpr float kMostFall = 8.0f, kLargeSum = Traits::kSumsByProduct ? 262144.0f : 65536.0f;  // 2^18

  float base[2];  // of exponents: what a weight of 2^kOffset has; -inf before the first key
  float sum[2];  // of weights, of this thread's columns; unused where kSumsByProduct

  __device__ __forceinline__ void start() {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      base[r] = -CUDART_INF_F;
      sum[r] = 0.0f;
    }
  }

  // Turns raw scores, which it overwrites, into weights, of which `pack` makes operands; gives the factors for what came before. before: the
  // sums of a row's weights so far, perhaps without the last tile's.
  //
  // Of each 16 weights the first kPolynomials come from the FMA pipe, as pairs of halves (ptx::exp2_halves), the
  // others from the special-function unit, which is the narrow one: 16 powers per multiprocessor and clock.
  template <class Variant>
  __device__ __forceinline__ void weigh(float (&s)[kScores], const Scales& scales, const float (&before)[2],
                                        float (&w)[kScores], float (&rescale)[2]) {
    float top[2] = {-CUDART_INF_F, -CUDART_INF_F}, bias[kScales][2], half_bias[kScales][2];
#pragma unroll
    for (int h = 0; h < kScales; ++h) {
      float raw[2];
      thread_maxima<Variant>(s, h, raw);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float scaled = raw[r] * scales.factor(h, r);
        top[r] = h == 0 ? scaled : fmaxf(top[r], scaled);
      }
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      // Before the exchange: where a thread has a sum of its own, all of a row fall together.
      top[r] = fmaxf(top[r], Traits::kTileBase && before[r] < kLargeSum ? base[r] - kMostFall : base[r]);
      top[r] = fmaxf(top[r], __shfl_xor_sync(0xffffffffu, top[r], 1));
      top[r] = fmaxf(top[r], __shfl_xor_sync(0xffffffffu, top[r], 2));
      const float from = top[r] == -CUDART_INF_F ? 0.0f : top[r];  // no key so far: any base gives weights 0
      rescale[r] = ptx::ex2(base[r] - from);
#pragma unroll
      for (int h = 0; h < kScales; ++h) bias[h][r] = kOffset - from;
      base[r] = top[r];
      sum[r] *= rescale[r];
    }
    if constexpr (Variant::kShift != 0.0f) take_shift<Variant>(s, scales, bias);
#pragma unroll
    for (int i = 0; i < 2 * kScales; ++i) {
      half_bias[i / 2][i % 2] = fmaf(bias[i / 2][i % 2], ptx::kExp2HalfScale, ptx::kExp2HalfBias);
    }
#pragma unroll
    for (int i = 0; i < kScores; i += 2) {
      const int r = i / 2 % 2, h = i / (kScores / kScales);
      const float scale = scales.factor(h, r), low = s[i], high = s[i + 1];
      if (by_polynomial(i)) {
        const float half_scale = scale * ptx::kExp2HalfScale;
        w[i] = __uint_as_float(
            ptx::exp2_halves(fmaf(low, half_scale, half_bias[h][r]), fmaf(high, half_scale, half_bias[h][r])));
      } else {
        w[i] = ptx::ex2(fmaf(low, scale, bias[h][r]));
        w[i + 1] = ptx::ex2(fmaf(high, scale, bias[h][r]));
        if (!Traits::kSumsByProduct) sum[r] += w[i] + w[i + 1];
      }
    }
  }

  // Weights as A operands of P V.
  __device__ __forceinline__ static void pack(const float (&w)[kScores], unsigned (&weights)[kSteps][4]) {
#pragma unroll
    for (int t = 0; t < kSteps; ++t) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {  // row i % 2, columns 16 (i / 2) on
        const int first = 16 * t + 8 * (i / 2) + 2 * (i % 2), second = first + 4;
        if (by_polynomial(first)) {
          weights[t][i] = ptx::pack_e4m3(__float_as_uint(w[first]), __float_as_uint(w[second]));
        } else {
          const float four[4] = {w[first], w[first + 1], w[second], w[second + 1]};
          weights[t][i] = ptx::pack_e4m3(four);
        }
      }
    }
  }

 private:
  // Weights come in groups of 16 that make the four registers of an A operand: registers 0, 1 and 4, 5 the first, of
  // row 0, 2, 3 and 6, 7 the second, of row 1, and so on.
  __device__ static constexpr bool by_polynomial(int i) {
    return 8 * (i / 8 % 2) + 4 * (i / 2 % 2) < Traits::kPolynomials;
  }

  // Takes the shift of raw scores out of the biases, which costs nothing for each score. A bias is then rounded at the
  // magnitude of kShift times a factor, so that a tile's exponents are off by up to 0.75 of that factor, all alike:
  // by less than one unit of an integer score, where the rounding of codes makes some hundred. Where even that is more
  // than 2^-8, the scores themselves are shifted, which is exact.
  template <class Variant>
  __device__ __forceinline__ static void take_shift(float (&s)[kScores], const Scales& scales,
                                                    float (&bias)[kScales][2]) {
    constexpr float kSteep = 0.00520833f;  // 2^-8 / 0.75
    float largest = 0.0f;
#pragma unroll
    for (int i = 0; i < 2 * kScales; ++i) largest = fmaxf(largest, scales.factor(i / 2, i % 2));
    if (Traits::kFineScales ? __any_sync(0xffffffffu, largest > kSteep) : largest > kSteep) {
#pragma unroll
      for (float& x : s) x -= Variant::kShift;
    } else {
#pragma unroll
      for (int i = 0; i < 2 * kScales; ++i) {
        float& of_row = bias[i / 2][i % 2];
        of_row = fmaf(-Variant::kShift, scales.factor(i / 2, i % 2), of_row);
      }
    }
  }

  // The largest raw scores of a thread's two rows among those of a scale of K, if above the base so far or, with
  // kTileBase, in any case. As integers, three at a time and starting from 0, positive floats compare as they should.
  // Where 0 comes out all are negative: of these the largest has the smallest bits.
  template <class Variant>
  __device__ __forceinline__ void thread_maxima(const float (&s)[kScores], int scale, float (&top)[2]) {
    constexpr int kCount = kScores / kScales;
    constexpr bool kShifted = Variant::kShift != 0.0f;  // all positive, but for -inf
    int whole[2] = {};
    if (kShifted) whole[0] = whole[1] = 0xff800000;  // of -inf
#pragma unroll
    for (int i = scale * kCount; i < (scale + 1) * kCount; i += 2) {
      int& m = whole[i / 2 % 2];
      m = __vimax3_s32(m, __float_as_int(s[i]), __float_as_int(s[i + 1]));
    }
    top[0] = __int_as_float(whole[0]) - Variant::kShift;
    top[1] = __int_as_float(whole[1]) - Variant::kShift;
    if constexpr (kShifted) return;
    const bool always = Traits::kTileBase;
    if (__any_sync(0xffffffffu, (whole[0] == 0 && (always || base[0] < 0.0f)) ||
                                    (whole[1] == 0 && (always || base[1] < 0.0f)))) {
      unsigned least[2] = {0xff800000u, 0xff800000u};  // of -inf
#pragma unroll
      for (int i = scale * kCount; i < (scale + 1) * kCount; i += 2) {
        unsigned& m = least[i / 2 % 2];
        m = __vimin3_u32(m, __float_as_uint(s[i]), __float_as_uint(s[i + 1]));
      }
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        if (whole[r] == 0) top[r] = __uint_as_float(least[r]);
      }
    }
  }
};

}  // namespace greenfast

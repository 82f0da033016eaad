// What a computing warpgroup of the Hopper attention kernel does with its 64 query rows.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <math_constants.h>

#include "hopper_plan.cuh"
#include "ptx/e4m3.cuh"
#include "ptx/grid_order.cuh"
#include "ptx/inverse.cuh"
#include "ptx/math.cuh"
#include "ptx/store.cuh"
#include "ptx/wgmma.cuh"

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

// A raw score: of E4M3 codes, which the tensor cores accumulate in float, and of int8 codes, exact. Of a masked tile they
// are floats in both: -inf for a key that a row does not attend to, whatever the scale.
template <bool kInt8>
struct RawScore {
  using Type = float;
};
template <>
struct RawScore<true> {
  using Type = int;
};

// Which of a thread's two rows attend to keys, or values, that are not all finite.
struct UnknownRows {
  bool scores[2], values[2];
};

// The rows of one warpgroup: a thread holds, of rows t / 4 and t / 4 + 8 of its warp's 16 (t: its lane), columns
// 8 j + 2 (t % 4) and the next one, for all j. Register i of scores and of O belongs to row i / 2 % 2 of the two.
template <class Cfg>
struct Consumer {
  using Shape = FlashShape<Cfg>;
  using Score = typename RawScore<Cfg::kInt8>::Type;
  static constexpr int kScores = Shape::kBlockN / 2;  // per thread
  static constexpr int kSteps = Shape::kBlockN / 32;  // of P V
  static constexpr int kOut = Shape::kHeadDim / 2;
  static constexpr int kPartial = Shape::kOutColumns / 2;
  static constexpr int kSums = Shape::kSumColumns / 2;  // behind the last part of O
  static constexpr int kParts = Shape::kHeadDim / Shape::kOutColumns;
  static constexpr int kScales = Cfg::kKeyBlockScales ? Shape::kBlockN / kRowBlock : 1;  // of K, in a tile
  // A row's largest weight is stored as 448 = 2^kOffset, E4M3's largest number, so that small ones keep their bits.
  static constexpr float kOffset = 8.807355f;
  static constexpr float kLeastScale = 1.17549435e-38f;  // of scores: 0 times the -inf of a masked one would be NaN
  // O is kept in units of the last tile's V, but not in units below 2^-84 of the largest, in which sums of more than
  // 2^26 keys of 448 times 448 could overflow. What a tile of smaller values adds counts as if it had that unit: it is
  // wrong, by less than 2^-58 of the largest value before. A factor for such a tile, behind a branch that none takes,
  // cost 10 % at head dim 128.
  static constexpr float kLeastUnit = 5.16987883e-26f;

  const FlashParams& p;
  FlashStorage<Cfg>& shared;
  const int warpgroup;
  const ptx::Operand<Shape::kDimPanel> q_tile, k_tiles;
  const ptx::Operand<Shape::kKeyPanel> v_tiles;
  Ring<Shape::kStages> k_ring, v_ring;
  int scale_at, last_scale;  // of blocks of keys: the next tile's, and the head's last
  float q_scale_log2;        // what a score in units of K's scale is multiplied by
  float scale_log2[kScales];
  float v_unit, v_ratio;     // of O, and by which it is to be multiplied for its units to be those of the next tile
  float v_largest;           // unit of a tile so far
  float o[kOut + kSums];
  float max[2];  // of scores so far, in base 2; -inf before the first key
  float sum[2];  // of weights, of this thread's columns; where the tensor cores do not sum

  __device__ __forceinline__ Consumer(const FlashParams& p, FlashStorage<Cfg>& shared, int warpgroup)
      : p(p), shared(shared), warpgroup(warpgroup), q_tile(shared.q[warpgroup]), k_tiles(shared.k), v_tiles(shared.v) {}

  __device__ __forceinline__ static void arrive(ptx::Mbarrier& barrier) {
    if (threadIdx.x % 32 == 0) barrier.arrive();
  }

  __device__ __forceinline__ void start(int kv_head, float q_scale) {
    if constexpr (Cfg::kKeyBlockScales) {
      const int blocks = (p.kv_len + kRowBlock - 1) / kRowBlock;
      scale_at = kv_head * blocks;
      last_scale = scale_at + blocks - 1;
      q_scale_log2 = q_scale;
    } else {
      const float scale = q_scale * p.k_scale[kv_head];
      scale_log2[0] = scale < kLeastScale ? kLeastScale : scale;  // NaN stays
    }
    if constexpr (Cfg::kValueBlockScales) {
      v_unit = 1.0f;  // O is 0, in any units
      v_largest = 3.63797881e-12f;  // 2^-38: the least unit is then the least scale, 2^-122
    }
#pragma unroll
    for (float& x : o) x = 0.0f;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      max[r] = -CUDART_INF_F;
      sum[r] = 0.0f;
    }
  }

  // The scales of the next tile.
  __device__ __forceinline__ void next_scales() {
    if constexpr (Cfg::kKeyBlockScales) {
#pragma unroll
      for (int h = 0; h < kScales; ++h) {
        const int at = kScales == 1 ? scale_at : min(scale_at + h, last_scale);
        scale_log2[h] = fmaxf(q_scale_log2 * ptx::load_written(p.k_scale + at), kLeastScale);  // not NaN either
      }
      scale_at += kScales;
    }
  }

  // Starts s = q k^T, raw.
  __device__ __forceinline__ void start_scores(Score (&s)[kScores]) {
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < Shape::kHeadDim / 32; ++i) {
      const int panel = i * 32 / Shape::kDimPanel, within = i * 32 % Shape::kDimPanel;
      const unsigned long long q = q_tile.at(panel * sizeof(shared.q[0][0]) + within);
      const unsigned long long k =
          k_tiles.at(k_ring.stage * sizeof(shared.k[0]) + panel * sizeof(shared.k[0][0]) + within);
      i == 0 ? ptx::wgmma_set(s, q, k) : ptx::wgmma_add(s, q, k);
    }
    ptx::wgmma_commit();
    next_scales();
  }

  // Ends it, while kPending later products are under way: the scores may be read, and K overwritten.
  template <int kPending>
  __device__ __forceinline__ void end_scores(Score (&s)[kScores]) {
    ptx::wgmma_wait<kPending>();
    ptx::pin(s);
    arrive(shared.k_empty[k_ring.stage]);
    k_ring.advance();
  }

  // Rows keep the scores of columns before their `end`, as floats.
  __device__ __forceinline__ static float (&mask(Score (&s)[kScores], const int (&end)[2]))[kScores] {
    float(&masked)[kScores] = reinterpret_cast<float(&)[kScores]>(s);
    const int column = threadIdx.x % 4 * 2;
#pragma unroll
    for (int i = 0; i < kScores; ++i) {
      masked[i] = i / 4 * 8 + column + i % 2 >= end[i / 2 % 2] ? -CUDART_INF_F : static_cast<float>(s[i]);
    }
    return masked;
  }

  // The largest raw scores of a thread's two rows among those of a scale of K, if above the row's largest so far. As
  // integers, three at a time and starting from 0, positive floats compare as they should. Where 0 comes out and the
  // row had nothing above 0 before, all are negative: of these the largest has the smallest bits.
  __device__ __forceinline__ void thread_maxima(const float (&s)[kScores], int scale, float (&top)[2]) {
    constexpr int kCount = kScores / kScales;
    int whole[2] = {0, 0};
#pragma unroll
    for (int i = scale * kCount; i < (scale + 1) * kCount; i += 2) {
      int& m = whole[i / 2 % 2];
      m = __vimax3_s32(m, __float_as_int(s[i]), __float_as_int(s[i + 1]));
    }
    top[0] = __int_as_float(whole[0]);
    top[1] = __int_as_float(whole[1]);
    if (__any_sync(0xffffffffu, (whole[0] == 0 && max[0] < 0.0f) || (whole[1] == 0 && max[1] < 0.0f))) {
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
  __device__ __forceinline__ void thread_maxima(const int (&s)[kScores], int scale, float (&top)[2]) {
    constexpr int kCount = kScores / kScales;
    int whole[2] = {-2147483647 - 1, -2147483647 - 1};
#pragma unroll
    for (int i = scale * kCount; i < (scale + 1) * kCount; i += 2) {
      int& m = whole[i / 2 % 2];
      m = __vimax3_s32(m, s[i], s[i + 1]);
    }
    top[0] = static_cast<float>(whole[0]);
    top[1] = static_cast<float>(whole[1]);
  }

  // Turns raw scores into weights, of which `pack` makes operands; gives the factors for what came before.
  //
  // Of each 16 weights the first kPolynomials come from the FMA pipe, as pairs of halves (ptx::exp2_halves), the
  // others from the special-function unit, which is the narrow one: 16 powers per multiprocessor and clock.
  template <class Any>
  __device__ __forceinline__ void softmax(const Any (&s)[kScores], float (&w)[kScores], float (&rescale)[2]) {
    float top[2] = {-CUDART_INF_F, -CUDART_INF_F}, bias[2], half_bias[2];
#pragma unroll
    for (int h = 0; h < kScales; ++h) {
      float raw[2];
      thread_maxima(s, h, raw);
#pragma unroll
      for (int r = 0; r < 2; ++r) top[r] = h == 0 ? raw[r] * scale_log2[h] : fmaxf(top[r], raw[r] * scale_log2[h]);
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      top[r] = fmaxf(top[r], __shfl_xor_sync(0xffffffffu, top[r], 1));
      top[r] = fmaxf(top[r], __shfl_xor_sync(0xffffffffu, top[r], 2));
      top[r] = fmaxf(top[r], max[r]);
      const float base = top[r] == -CUDART_INF_F ? 0.0f : top[r];  // no key so far: any base gives weights 0
      rescale[r] = ptx::ex2(max[r] - base);
      bias[r] = kOffset - base;
      half_bias[r] = fmaf(bias[r], ptx::kExp2HalfScale, ptx::kExp2HalfBias);
      max[r] = top[r];
      sum[r] *= rescale[r];
    }
#pragma unroll
    for (int i = 0; i < kScores; i += 2) {
      const int r = i / 2 % 2;
      const float scale = scale_log2[i / (kScores / kScales)];
      const float low = static_cast<float>(s[i]), high = static_cast<float>(s[i + 1]);
      if (by_polynomial(i)) {
        const float half_scale = scale * ptx::kExp2HalfScale;
        w[i] = __uint_as_float(
            ptx::exp2_halves(fmaf(low, half_scale, half_bias[r]), fmaf(high, half_scale, half_bias[r])));
      } else {
        w[i] = ptx::ex2(fmaf(low, scale, bias[r]));
        w[i + 1] = ptx::ex2(fmaf(high, scale, bias[r]));
        if (kSums == 0) sum[r] += w[i] + w[i + 1];
      }
    }
  }

  template <bool kMasked>
  __device__ __forceinline__ void softmax_of(Score (&s)[kScores], const int (&end)[2], float (&w)[kScores],
                                             float (&rescale)[2]) {
    if constexpr (kMasked) {
      softmax(mask(s, end), w, rescale);
    } else {
      softmax(s, w, rescale);
    }
  }

  // Weights come in groups of 16 that make the four registers of an A operand: registers 0, 1 and 4, 5 the first, of
  // row 0, 2, 3 and 6, 7 the second, of row 1, and so on.
  __device__ static constexpr bool by_polynomial(int i) {
    return 8 * (i / 8 % 2) + 4 * (i / 2 % 2) < Cfg::kPolynomials;
  }

  __device__ __forceinline__ void pack(const float (&w)[kScores], unsigned (&weights)[kSteps][4]) {
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

  // Starts partial = P V or += P V, of the columns of a part of O, and behind the last part the sums of P.
  template <bool kAdd, int kCount>
  __device__ __forceinline__ void start_output(float (&partial)[kCount], const unsigned (&weights)[kSteps][4],
                                               int part) {
    ptx::wgmma_fence();
#pragma unroll
    for (int t = 0; t < kSteps; ++t) {
      const int panel = t * 32 / Shape::kKeyPanel, within = t * 32 % Shape::kKeyPanel;
      const unsigned long long v = v_tiles.at(v_ring.stage * sizeof(shared.v[0]) + panel * sizeof(shared.v[0][0]) +
                                              part * Shape::kOutColumns * Shape::kKeyPanel + within);
      t == 0 && !kAdd ? ptx::wgmma_set(partial, weights[t], v) : ptx::wgmma_add(partial, weights[t], v);
    }
    ptx::wgmma_commit();
  }

  // Adds a part to what came before, which it rescales.
  template <int kCount>
  __device__ __forceinline__ void add_output(const float (&partial)[kCount], int part, const float (&rescale)[2]) {
    const float ratio = Cfg::kValueBlockScales ? v_ratio : 1.0f;  // not of the sums, which have no units
    const float of_output[2] = {rescale[0] * ratio, rescale[1] * ratio};
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      float& x = o[part * kPartial + i];
      x = fmaf(x, i < kPartial ? of_output[i / 2 % 2] : rescale[i / 2 % 2], partial[i]);
    }
  }

  // The ratio for the tile whose weights have been found. A scale of NaN, whose codes are 0, is none: fmaxf leaves it out.
  __device__ __forceinline__ float next_ratio() {
    if constexpr (!Cfg::kValueBlockScales) return 1.0f;
    const float before = v_unit, unit = ptx::load_written(p.v_scale + scale_at - 1);
    v_largest = fmaxf(v_largest, unit);
    v_unit = fmaxf(unit, v_largest * kLeastUnit);
    return before * ptx::inverse(v_unit);
  }

  __device__ __forceinline__ void release_values() {
    arrive(shared.v_empty[v_ring.stage]);
    v_ring.advance();
  }

  // With turns, warpgroups start their products one after the other: P V of a tile and Q K^T of the next. Left alone
  // they fall into step, and all wait for the same unit.
  __device__ __forceinline__ void take_turn() {
    if constexpr (Cfg::kTurns) ptx::barrier_sync(1 + warpgroup, 256);
  }
  __device__ __forceinline__ void pass_turn() {
    if constexpr (Cfg::kTurns) ptx::barrier_arrive(1 + (warpgroup + 1 == Shape::kConsumers ? 0 : warpgroup + 1), 256);
  }

  // One tile of keys, from this warpgroup's turn to its next one.
  template <bool kMasked>
  __device__ __forceinline__ void step(const int (&end)[2]) {
    Score s[kScores];
    unsigned weights[kSteps][4];
    float w[kScores], rescale[2];
    shared.k_full[k_ring.stage].wait(k_ring.parity);
    start_scores(s);
    pass_turn();
    end_scores<0>(s);
    softmax_of<kMasked>(s, end, w, rescale);
    pack(w, weights);
    v_ratio = next_ratio();
    shared.v_full[v_ring.stage].wait(v_ring.parity);
    take_turn();
#pragma unroll
    for (int part = 0; part < kParts - 1; ++part) {
      float partial[kPartial];
      start_output<false>(partial, weights, part);
      ptx::wgmma_wait<0>();
      ptx::pin(partial);
      add_output(partial, part, rescale);
    }
    float last[kPartial + kSums];
    start_output<false>(last, weights, kParts - 1);
    ptx::wgmma_wait<0>();
    ptx::pin(last);
    add_output(last, kParts - 1, rescale);
    release_values();
  }

  // The same where P V of a tile runs beside the softmax of the next one: a tile leaves its weights and factors, and
  // P V begins in the turn of the next tile.
  template <bool kMasked, bool kFirst>
  __device__ __forceinline__ void overlapped_step(unsigned (&weights)[kSteps][4], float (&rescale)[2],
                                                  const int (&end)[2]) {
    Score s[kScores];
    float w[kScores], partial[kOut + kSums], next[2];
    shared.k_full[k_ring.stage].wait(k_ring.parity);
    if constexpr (!kFirst) take_turn();
    start_scores(s);
    if constexpr (!kFirst) start_last_output(partial, weights);
    pass_turn();
    end_scores<kFirst ? 0 : 1>(s);
    softmax_of<kMasked>(s, end, w, next);
    const float ratio = next_ratio();
    if constexpr (!kFirst) end_last_output(partial, rescale, {next[0] * ratio, next[1] * ratio});
    v_ratio = ratio;
#pragma unroll
    for (int r = 0; r < 2; ++r) rescale[r] = next[r];
    pack(w, weights);  // not before: P V was reading them
  }

  __device__ __forceinline__ void start_last_output(float (&partial)[kOut + kSums],
                                                    const unsigned (&weights)[kSteps][4]) {
    shared.v_full[v_ring.stage].wait(v_ring.parity);
    if constexpr (Cfg::kTwoLevels) {
      start_output<false>(partial, weights, 0);
    } else {
      start_output<true>(o, weights, 0);
    }
  }

  // With one level of accumulation, O is rescaled by the factors of the next tile before that is added.
  __device__ __forceinline__ void end_last_output(float (&partial)[kOut + kSums], const float (&rescale)[2],
                                                  const float (&next)[2]) {
    ptx::wgmma_wait<0>();
    if constexpr (Cfg::kTwoLevels) {
      ptx::pin(partial);
      add_output(partial, 0, rescale);
    } else {
      ptx::pin(o);
      if (__any_sync(0xffffffffu, next[0] != 1.0f || next[1] != 1.0f)) {
#pragma unroll
        for (int i = 0; i < kOut + kSums; ++i) o[i] *= next[i / 2 % 2];
      }
    }
    release_values();
  }

  // All tiles of a piece of work: `whole` of which these rows attend to all keys, and `masked` more.
  __device__ __forceinline__ void run(int whole, int masked, int (&end)[2]) {
    const auto next_masked = [&] {
      for (int r = 0; r < 2; ++r) end[r] -= Shape::kBlockN;
    };
    take_turn();
    if constexpr (!Cfg::kOverlap) {
      for (; whole > 0; --whole) step<false>(end);
      for (; masked > 0; --masked, next_masked()) step<true>(end);
    } else if (whole + masked > 0) {
      unsigned weights[kSteps][4];
      float rescale[2], partial[kOut + kSums];
      if (whole > 0) {
        overlapped_step<false, true>(weights, rescale, end);
        --whole;
      } else {
        overlapped_step<true, true>(weights, rescale, end);
        --masked;
        next_masked();
      }
      for (; whole > 0; --whole) overlapped_step<false, false>(weights, rescale, end);
      for (; masked > 0; --masked, next_masked()) overlapped_step<true, false>(weights, rescale, end);
      take_turn();
      start_last_output(partial, weights);
      const float one[2] = {1.0f, 1.0f};
      end_last_output(partial, rescale, one);
    }
    pass_turn();
  }

  // Writes the rows before q_len: O / sum, and the log-sum-exp. Rows that attend to what is unknown are NaN.
  __device__ __forceinline__ void store(int head, int first_row, int kv_head, const UnknownRows& unknown) {
    using Out = typename Cfg::Out;
    const int quad = threadIdx.x % 4;
    Out* const begin = static_cast<Out*>(p.out) + p.rows.first(head);
    const float* channels = p.v_scale + (Cfg::kChannelScales ? kv_head * Shape::kHeadDim : 0);
    float unit = 1.0f;  // of O
    if constexpr (Cfg::kValueBlockScales) {
      unit = v_unit;
    } else if constexpr (!Cfg::kChannelScales) {
      unit = p.v_scale[kv_head];
    }
    if (unit < 1e-20f) {  // its quotient by a sum could be subnormal
#pragma unroll
      for (int i = 0; i < kOut; ++i) o[i] *= unit;
      unit = 1.0f;
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float total = kSums > 0 ? o[kOut + 2 * r] : sum[r];
      if (kSums == 0) {
        total += __shfl_xor_sync(0xffffffffu, total, 1);
        total += __shfl_xor_sync(0xffffffffu, total, 2);
      }
      const bool any = total >= 1.0f;  // a row with a key has a weight of 448
      const float factor = unknown.scores[r] || unknown.values[r] ? CUDART_NAN_F : any ? unit / total : 0.0f;
      const int row = first_row + threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4 + 8 * r;
      Out* const out = begin + row * p.rows.row;
#pragma unroll
      for (int j = 0; j < Shape::kHeadDim / 8; j += 4) {
        unsigned x[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          float low = o[4 * (j + i) + 2 * r] * factor, high = o[4 * (j + i) + 2 * r + 1] * factor;
          if constexpr (Cfg::kChannelScales) {
            const float2 scales = __ldg(reinterpret_cast<const float2*>(channels + 8 * (j + i) + 2 * quad));
            low *= scales.x;
            high *= scales.y;
          }
          x[i] = pack_out(low, high, static_cast<Out*>(nullptr));
        }
        transpose_quad(x);
        const int column = 8 * (j + quad);
        if (row < p.q_len && (!Cfg::kFewerColumns || column < p.rows.columns)) {
          ptx::store_16(out + column, x);
        }
      }
      if (Cfg::kLse && quad == 0 && row < p.q_len) {
        const float ln2 = 0.6931471805599453f;
        const float lse = any ? (log2f(total) - kOffset + max[r]) * ln2 : -CUDART_INF_F;
        p.lse[static_cast<size_t>(head) * p.q_len + row] = unknown.scores[r] ? CUDART_NAN_F : lse;
      }
    }
  }
};

}  // namespace greenfast

// What a computing warpgroup of the Hopper attention kernel does with its 64 query rows.
#pragma once

#include <cuda_fp16.h>
#include <math_constants.h>

#include "hopper_plan.cuh"
#include "ptx/e4m3.cuh"
#include "ptx/math.cuh"
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

// 2^x to 1.7e-3, on the FMA pipe: the special-function unit is the narrow one, and E4M3 rounds to 2^-4.
__device__ __forceinline__ float ex2_polynomial(float x) {
  const float magic = 12582912.0f;  // 1.5 * 2^23: its sum with a number ends in that number's integer
  const float clamped = fmaxf(x, -100.0f);
  const float shifted = clamped + magic;
  const float fraction = clamped - (shifted - magic);
  const float power = fmaf(fmaf(fraction, 0.23842889f, 0.70344818f), fraction, 1.0004432f);
  return __int_as_float(__float_as_int(power) + (__float_as_int(shifted) << 23));
}

// The rows of one warpgroup: a thread holds, of rows t / 4 and t / 4 + 8 of its warp's 16 (t: its lane), columns
// 8 j + 2 (t % 4) and the next one, for all j. Register i of scores and of O belongs to row i / 2 % 2 of the two.
template <class Cfg>
struct Consumer {
  using Shape = FlashShape<Cfg>;
  static constexpr int kScores = Shape::kBlockN / 2;  // per thread
  static constexpr int kSteps = Shape::kBlockN / 32;  // of P V
  static constexpr int kOut = Shape::kHeadDim / 2;
  static constexpr int kPartial = Shape::kOutColumns / 2;
  static constexpr int kParts = Shape::kHeadDim / Shape::kOutColumns;
  // Weights are stored times 2^8, of at most 448, so that small ones keep their bits.
  static constexpr float kOffset = 8.0f;

  FlashStorage<Cfg>& shared;
  const int warpgroup;
  const ptx::Operand<Shape::kDimPanel> q_tile, k_tiles;
  const ptx::Operand<Shape::kKeyPanel> v_tiles;
  Ring<Shape::kStages> k_ring, v_ring;
  float scale_log2;
  float o[kOut];
  float max[2];  // of raw scores so far; -inf before the first key
  float sum[2];  // of weights, of this thread's columns

  __device__ __forceinline__ Consumer(FlashStorage<Cfg>& shared, int warpgroup)
      : shared(shared), warpgroup(warpgroup), q_tile(shared.q[warpgroup]), k_tiles(shared.k), v_tiles(shared.v) {}

  __device__ __forceinline__ static void arrive(ptx::Mbarrier& barrier) {
    if (threadIdx.x % 32 == 0) barrier.arrive();
  }

  __device__ __forceinline__ void start(float scale) {
    scale_log2 = scale;
#pragma unroll
    for (int i = 0; i < kOut; ++i) o[i] = 0.0f;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      max[r] = -CUDART_INF_F;
      sum[r] = 0.0f;
    }
  }

  // Starts s = q k^T, raw.
  __device__ __forceinline__ void start_scores(float (&s)[kScores]) {
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
  }

  // Ends it: the scores may be read, and K overwritten.
  __device__ __forceinline__ void end_scores(float (&s)[kScores]) {
    ptx::wgmma_wait<0>();
    ptx::pin(s);
    arrive(shared.k_empty[k_ring.stage]);
    k_ring.advance();
  }

  // Rows keep the scores of columns before their `end`.
  __device__ __forceinline__ void mask(float (&s)[kScores], const int (&end)[2]) {
    const int column = threadIdx.x % 4 * 2;
#pragma unroll
    for (int i = 0; i < kScores; ++i) {
      if (i / 4 * 8 + column + i % 2 >= end[i / 2 % 2]) s[i] = -CUDART_INF_F;
    }
  }

  // The largest raw scores of this thread's two rows. As integers, three at a time and beside 0, positive floats
  // compare as they should; where 0 comes out, the floats themselves decide.
  __device__ __forceinline__ void row_maxima(const float (&s)[kScores], float (&top)[2]) {
    int whole[2] = {0, 0};
#pragma unroll
    for (int i = 0; i < kScores; i += 2) {
      int& m = whole[i / 2 % 2];
      m = __vimax3_s32(m, __float_as_int(s[i]), __float_as_int(s[i + 1]));
    }
    top[0] = __int_as_float(whole[0]);
    top[1] = __int_as_float(whole[1]);
    if (__any_sync(0xffffffffu, top[0] == 0.0f || top[1] == 0.0f)) {
      top[0] = top[1] = -CUDART_INF_F;
#pragma unroll
      for (int i = 0; i < kScores; ++i) top[i / 2 % 2] = fmaxf(top[i / 2 % 2], s[i]);
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      top[r] = fmaxf(top[r], __shfl_xor_sync(0xffffffffu, top[r], 1));
      top[r] = fmaxf(top[r], __shfl_xor_sync(0xffffffffu, top[r], 2));
    }
  }

  // Turns raw scores into packed weights and adds these to the sums; gives the factors for what came before.
  __device__ __forceinline__ void softmax(const float (&s)[kScores], unsigned (&weights)[kSteps][4],
                                          float (&rescale)[2]) {
    float top[2], bias[2];
    row_maxima(s, top);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      top[r] = fmaxf(top[r], max[r]);
      const float base = top[r] == -CUDART_INF_F ? 0.0f : top[r];  // no key so far: any base gives weights 0
      rescale[r] = ptx::ex2((max[r] - base) * scale_log2);
      bias[r] = fmaf(-base, scale_log2, kOffset);
      max[r] = top[r];
      sum[r] *= rescale[r];
    }
#pragma unroll
    for (int t = 0; t < kSteps; ++t) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {  // registers of the A operand: row i % 2, columns 16 (i / 2) on
        float w[4];
#pragma unroll
        for (int n = 0; n < 4; ++n) {
          const int r = i % 2, j = 4 * t + i / 2 * 2 + n / 2;
          const float x = fmaf(s[4 * j + 2 * r + n % 2], scale_log2, bias[r]);
          w[n] = 4 * i + n >= 16 - Cfg::kPolynomials ? ex2_polynomial(x) : ptx::ex2(x);
          sum[r] += w[n];
        }
        weights[t][i] = ptx::pack_e4m3(w);
      }
    }
  }

  // Starts partial = P V, of the columns of a part of O.
  __device__ __forceinline__ void start_output(float (&partial)[kPartial], const unsigned (&weights)[kSteps][4],
                                               int part) {
    ptx::wgmma_fence();
#pragma unroll
    for (int t = 0; t < kSteps; ++t) {
      const int panel = t * 32 / Shape::kKeyPanel, within = t * 32 % Shape::kKeyPanel;
      const unsigned long long v = v_tiles.at(v_ring.stage * sizeof(shared.v[0]) + panel * sizeof(shared.v[0][0]) +
                                              part * Shape::kOutColumns * Shape::kKeyPanel + within);
      t == 0 ? ptx::wgmma_set(partial, weights[t], v) : ptx::wgmma_add(partial, weights[t], v);
    }
    ptx::wgmma_commit();
  }

  __device__ __forceinline__ void end_output(float (&partial)[kPartial], int part, const float (&rescale)[2]) {
    ptx::pin(partial);
#pragma unroll
    for (int i = 0; i < kPartial; ++i) {
      float& x = o[part * kPartial + i];
      x = fmaf(x, rescale[i / 2 % 2], partial[i]);
    }
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
    float s[kScores];
    unsigned weights[kSteps][4];
    float rescale[2];
    shared.k_full[k_ring.stage].wait(k_ring.parity);
    start_scores(s);
    pass_turn();
    end_scores(s);
    if constexpr (kMasked) mask(s, end);
    softmax(s, weights, rescale);
    shared.v_full[v_ring.stage].wait(v_ring.parity);
    take_turn();
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      float partial[kPartial];
      start_output(partial, weights, part);
      ptx::wgmma_wait<0>();
      end_output(partial, part, rescale);
    }
    arrive(shared.v_empty[v_ring.stage]);
    v_ring.advance();
  }

  // Writes the rows before q_len: O / sum, and the log-sum-exp.
  __device__ __forceinline__ void store(const FlashParams& p, int head, int first_row, float v_scale) {
    const int quad = threadIdx.x % 4;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float total = sum[r];
      total += __shfl_xor_sync(0xffffffffu, total, 1);
      total += __shfl_xor_sync(0xffffffffu, total, 2);
      const bool any = total >= 1.0f;  // a row's largest weight is 2^kOffset
      const float factor = any ? v_scale / total : 0.0f;
      const int row = first_row + threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4 + 8 * r;
      const size_t line = static_cast<size_t>(head) * p.q_len + row;
#pragma unroll
      for (int j = 0; j < Shape::kHeadDim / 8; j += 4) {
        unsigned x[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const half2 pair = __floats2half2_rn(o[4 * (j + i) + 2 * r] * factor, o[4 * (j + i) + 2 * r + 1] * factor);
          x[i] = reinterpret_cast<const unsigned&>(pair);
        }
        transpose_quad(x);
        if (row < p.q_len) {
          half* out = p.out + line * Shape::kHeadDim + 8 * (j + quad);
          *reinterpret_cast<uint4*>(out) = make_uint4(x[0], x[1], x[2], x[3]);
        }
      }
      if (p.lse != nullptr && quad == 0 && row < p.q_len) {
        const float ln2 = 0.6931471805599453f;
        p.lse[line] = any ? (log2f(total) - kOffset + max[r] * scale_log2) * ln2 : -CUDART_INF_F;
      }
    }
  }
};

}  // namespace greenfast

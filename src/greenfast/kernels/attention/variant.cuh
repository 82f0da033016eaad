// Axis: from scores to exponents. What a raw score is multiplied by to be an exponent of two.
//
// A raw score is the product of a row's codes of Q and a key's codes of K. What is no product of these, such as a
// softcap, turns raw scores into others before the mask: ScoreVariant.
#pragma once

#include "attention/seqlen.cuh"
#include "ptx/griddepcontrol.cuh"
#include "ptx/math.cuh"

namespace greenfast {

// A raw score as the tensor cores leave it: a float of E4M3 codes, an int of int8 codes. Sums of int8 start at the bits
// of kShift: then they are floats by their bits, exact and kShift too large, as 256 products of codes stay within 2^22.
// A conversion for each score would cost 10 to 15 % of the kernel's time.
template <bool kInt8>
struct RawScore {
  using Type = float;
  static constexpr float kShift = 0.0f;
};
template <>
struct RawScore<true> {
  using Type = int;
  static constexpr float kShift = 12582912.0f;  // 1.5 times 2^23
  static constexpr int kStart = 0x4b400000;     // its bits
};

// Scales of Q, K and the softmax, and log2 e, of the current tile. No factor is 0, which times -inf would be NaN.
template <class Traits>
struct ScoreScales {
  static constexpr int kScales = Traits::kKeyBlockScales ? Traits::kBlockN / kRowBlock : 1;  // of K, in a tile
  static constexpr int kRowScales = Traits::kFineScales ? 2 : 1;                             // of a thread's two rows
  static constexpr float kLeast = 1.17549435e-38f;

  float factors[kScales][kRowScales];  // of a tile's scores, in as many equal parts
  int next_block, last_block;          // of K's scales: the next tile's first, and the head's last
  float q_factor[kRowScales];          // what a score in units of K's scale is multiplied by

  // Of part h of row r's scores.
  __device__ __forceinline__ float factor(int h, int r) const { return factors[h][kRowScales == 1 ? 0 : r]; }

  // q_scale: of the rows of this thread. Without scales of blocks the factor is NaN where q_scale or K's scale is.
  __device__ __forceinline__ void start(const FlashParams& p, const Sequence& sequence, const KeyRows& keys,
                                        const float (&q_scale)[kRowScales]) {
    const float log2_e = 1.4426950408889634f;
    float of_row[kRowScales];
#pragma unroll
    for (int r = 0; r < kRowScales; ++r) of_row[r] = q_scale[r] * p.softmax_scale * log2_e;
    if constexpr (Traits::kKeyBlockScales) {
      next_block = static_cast<int>(sequence.first_kv_block(keys));
      last_block = next_block + sequence.kv_blocks() - 1;
#pragma unroll
      for (int r = 0; r < kRowScales; ++r) q_factor[r] = of_row[r];
    } else {
      const float scale = of_row[0] * p.k_scale[keys.kv_head];
      factors[0][0] = scale < kLeast ? kLeast : scale;
    }
  }

  // What all scores of row r are multiplied by; NaN where a scale is.
  __device__ __forceinline__ float row_factor(int r) const {
    return Traits::kKeyBlockScales ? q_factor[kRowScales == 1 ? 0 : r] : factors[0][0];
  }

  // Reads the factors of the next tile. A scale that is NaN, whose codes are 0, counts as the least.
  __device__ __forceinline__ void next(const FlashParams& p) {
    if constexpr (Traits::kKeyBlockScales) {
#pragma unroll
      for (int h = 0; h < kScales; ++h) {
        const int block = kScales == 1 ? next_block : min(next_block + h, last_block);
        const size_t at = Traits::kFineScales ? static_cast<size_t>(block) * kKeyGroups + threadIdx.x % kKeyGroups : block;
        const float k_scale = ptx::load_written(p.k_scale + at);
#pragma unroll
        for (int r = 0; r < kRowScales; ++r) factors[h][r] = fmaxf(q_factor[r] * k_scale, kLeast);
      }
      next_block += kScales;
    }
  }
};

// Raw scores of a tile as the mask and the softmax take them, as floats, and the scales that turn these into exponents.
template <class Traits, bool kCapped = (Traits::kSoftcap > 0.0f)>
struct ScoreVariant {
  static constexpr float kShift = RawScore<Traits::kInt8>::kShift;  // by which scores are too large

  template <int kCount, class Score>
  __device__ __forceinline__ static float (&scores(Score (&s)[kCount], const ScoreScales<Traits>&))[kCount] {
    return reinterpret_cast<float(&)[kCount]>(s);
  }
  __device__ __forceinline__ static const ScoreScales<Traits>& scales(const ScoreScales<Traits>& of_tile) {
    return of_tile;
  }
};

// Softcap: the hyperbolic tangents take the place of the scores, and all have one scale.
template <class Traits>
struct ScoreVariant<Traits, true> {
  static constexpr float kLog2E = 1.4426950408889634f, kShift = 0.0f;

  template <int kCount, class Score>
  __device__ __forceinline__ static float (&scores(Score (&s)[kCount], const ScoreScales<Traits>& of_tile))[kCount] {
    float(&capped)[kCount] = reinterpret_cast<float(&)[kCount]>(s);
    constexpr int kOfScale = kCount / ScoreScales<Traits>::kScales;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const float scale = of_tile.factor(i / kOfScale, i / 2 % 2) * (1.0f / (Traits::kSoftcap * kLog2E));
      capped[i] = ptx::tanh((capped[i] - RawScore<Traits::kInt8>::kShift) * scale);
    }
    return capped;
  }
  __device__ __forceinline__ static ScoreScales<Traits> scales(ScoreScales<Traits> of_tile) {
    for (auto& of_part : of_tile.factors) {
      for (float& factor : of_part) factor = Traits::kSoftcap * kLog2E;
    }
    return of_tile;
  }
};

}  // namespace greenfast

// Axis: from raw scores to exponents of two.
//
// A raw score is the product of the quantized Q and K. ScoreScales holds the factors that make it an exponent.
// Transforms that are no product with a factor, such as softcap, change raw scores before the mask: ScoreVariant.
#pragma once

#include "attention/seqlen.cuh"
#include "ptx/griddepcontrol.cuh"
#include "ptx/math.cuh"

namespace greenfast {

// The accumulator type of Q K^T: float for E4M3, int for int8. An int8 accumulator starts at kStart, the bits of
// kShift. Read as a float, it is then kShift plus the exact sum, since 256 products stay within 2^22. Converting each
// score instead would cost 10 to 15 % of the kernel's time.
template <bool kInt8>
struct RawScore {
  using Type = float;
  static constexpr float kShift = 0.0f;
};
template <>
struct RawScore<true> {
  using Type = int;
  static constexpr float kShift = 12582912.0f;  // 1.5 * 2^23
  static constexpr int kStart = 0x4b400000;     // its bits
};

// The factors of the current tile: q_scale * k_scale * softmax_scale * log2(e). Never 0: 0 times -inf would be NaN.
template <class Traits>
struct ScoreScales {
  static constexpr int kScales = Traits::kKeyBlockScales ? Traits::kBlockN / kRowBlock : 1;  // scales of K in a tile
  static constexpr int kRowScales = Traits::kFineScales ? 2 : 1;                             // per thread's two rows
  static constexpr float kMinFactor = 1.17549435e-38f;

  float factors[kScales][kRowScales];  // for equal parts of a tile's keys
  int next_block, last_block;          // block indices into k_scale: first of the next tile, last of the head
  float q_factor[kRowScales];          // factor without k_scale
  float k_scale;                       // of the current tile, with kScheduled

  // The factor of part h of row r.
  __device__ __forceinline__ float factor(int h, int r) const { return factors[h][kRowScales == 1 ? 0 : r]; }

  // Starts a work tile. q_scale: of this thread's rows. Without block scales the factor is NaN if q_scale or k_scale
  // is.
  __device__ __forceinline__ void start(const FlashParams& p, const typename Traits::Sequence& sequence,
                                        const typename Traits::Keys& keys, const float (&q_scale)[kRowScales]) {
    const float log2_e = 1.4426950408889634f;
    float row_scale[kRowScales];
#pragma unroll
    for (int r = 0; r < kRowScales; ++r) row_scale[r] = q_scale[r] * p.softmax_scale * log2_e;
    if constexpr (Traits::kKeyBlockScales) {
      next_block = static_cast<int>(sequence.first_kv_block(keys));
      last_block = next_block + sequence.kv_blocks() - 1;
#pragma unroll
      for (int r = 0; r < kRowScales; ++r) q_factor[r] = row_scale[r];
    } else {
      const float scale = row_scale[0] * p.k_scale[keys.kv_head];
      factors[0][0] = scale < kMinFactor ? kMinFactor : scale;
    }
  }

  // The common factor of row r; NaN if a scale is NaN.
  __device__ __forceinline__ float row_factor(int r) const {
    return Traits::kKeyBlockScales ? q_factor[kRowScales == 1 ? 0 : r] : factors[0][0];
  }

  // Loads the factors of the next tile. A NaN scale (of zero codes) is replaced by the minimum.
  __device__ __forceinline__ void next(const FlashParams& p) {
    if constexpr (Traits::kKeyBlockScales) {
#pragma unroll
      for (int h = 0; h < kScales; ++h) {
        const int block = kScales == 1 ? next_block : min(next_block + h, last_block);
        const size_t index =
            Traits::kFineScales ? static_cast<size_t>(block) * kKeyGroups + threadIdx.x % kKeyGroups : block;
        const float k_scale = ptx::load_written(p.k_scale + index);
        if constexpr (Traits::kScheduled) this->k_scale = k_scale;
#pragma unroll
        for (int r = 0; r < kRowScales; ++r) factors[h][r] = fmaxf(q_factor[r] * k_scale, kMinFactor);
      }
      next_block += kScales;
    }
  }
};

// Transforms a tile's raw scores to the floats that mask and softmax use, and provides the floats' scales.
template <class Traits, bool kCapped = (Traits::kSoftcap > 0.0f)>
struct ScoreVariant {
  static constexpr float kShift = RawScore<Traits::kInt8>::kShift;  // offset that raw scores contain

  template <int kCount, class Score>
  __device__ __forceinline__ static float (&scores(Score (&s)[kCount], const ScoreScales<Traits>&))
      [kCount] { return reinterpret_cast<float (&)[kCount]>(s); } __device__ __forceinline__
      static const ScoreScales<Traits>& scales(const ScoreScales<Traits>& tile_scales) {
    return tile_scales;
  }
};

// Softcap: replaces raw scores by tanh, after which all scores have the same scale.
template <class Traits>
struct ScoreVariant<Traits, true> {
  static constexpr float kLog2E = 1.4426950408889634f, kShift = 0.0f;

  template <int kCount, class Score>
  __device__ __forceinline__ static float (&scores(Score (&s)[kCount], const ScoreScales<Traits>& tile_scales))
      [kCount] {
        float (&capped)[kCount] = reinterpret_cast<float (&)[kCount]>(s);
        constexpr int kOfScale = kCount / ScoreScales<Traits>::kScales;
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
          const float scale = tile_scales.factor(i / kOfScale, i / 2 % 2) * (1.0f / (Traits::kSoftcap * kLog2E));
          capped[i] = ptx::tanh((capped[i] - RawScore<Traits::kInt8>::kShift) * scale);
        }
        return capped;
      } __device__ __forceinline__ static ScoreScales<Traits> scales(ScoreScales<Traits> tile_scales) {
    for (auto& part_factors : tile_scales.factors) {
      for (float& factor : part_factors) factor = Traits::kSoftcap * kLog2E;
    }
    return tile_scales;
  }
};

}  // namespace greenfast

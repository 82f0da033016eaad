// Axis: scales of V. Tracks the V scale of the accumulator O if each tile of V has its own scale.
#pragma once

#include "attention/params.cuh"
#include "ptx/griddepcontrol.cuh"
#include "ptx/math.cuh"

namespace greenfast {

// O has the V scale of the last tile, but at least kMinRatio = 2^-84 of the largest one. With a smaller scale, sums
// over more than 2^26 keys of 448 times 448 could overflow. A tile with a smaller scale is added as if it had that
// minimum. The error is below 2^-58 of the largest value so far. An exact factor for such tiles, in a branch that is
// never taken, cost 10 % at head dim 128.
template <class Traits>
struct VScaleTracker {
  static constexpr float kMinRatio = 5.16987883e-26f;  // of the largest scale

  float acc_rescale;  // factor for O, to change its scale to the next tile's
  float acc_scale;    // scale of O
  float max_scale;    // largest scale of a tile so far
  float tile_scale;   // of the tile before, with kScheduled

  __device__ __forceinline__ void start() {
    if constexpr (Traits::kValueBlockScales) {
      acc_scale = 1.0f;             // O is 0
      max_scale = 3.63797881e-12f;  // 2^-38: the minimum acc_scale is then the minimum scale, 2^-122
    }
  }

  // Returns the factor for the tile with the scale at index next_block - 1. fmaxf ignores a NaN scale (of zero codes).
  __device__ __forceinline__ float next(const FlashParams& p, int next_block) {
    if constexpr (!Traits::kValueBlockScales) return 1.0f;
    const float before = acc_scale, tile_scale = ptx::load_written(p.v_scale + next_block - 1);
    max_scale = fmaxf(max_scale, tile_scale);
    if constexpr (Traits::kScheduled) this->tile_scale = tile_scale;
    acc_scale = fmaxf(tile_scale, max_scale * kMinRatio);
    return before * ptx::inverse(acc_scale);
  }

  // With kScheduled: only loads the scale of that tile.
  __device__ __forceinline__ void load(const FlashParams& p, int next_block) {
    tile_scale = ptx::load_written(p.v_scale + next_block - 1);
  }

  // Returns the scale of the final O; 1 with per-channel scales (the epilogue applies them).
  __device__ __forceinline__ float last(const FlashParams& p, int kv_head) const {
    if constexpr (Traits::kValueBlockScales) {
      return acc_scale;
    } else if constexpr (!Traits::kChannelScales) {
      return p.v_scale[kv_head];
    }
    return 1.0f;
  }
};

}  // namespace greenfast

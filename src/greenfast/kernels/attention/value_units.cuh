// Axis: scales of V. In which units O is kept while tiles of V have scales of their own.
#pragma once

#include "attention/params.cuh"
#include "ptx/griddepcontrol.cuh"
#include "ptx/math.cuh"

namespace greenfast {

// O is kept in units of the last tile's V, but not in units below 2^-84 of the largest, in which sums of more than 2^26
// keys of 448 times 448 could overflow. What a tile of smaller values adds counts as if it had that unit: it is wrong,
// by less than 2^-58 of the largest value before. A factor for such a tile, behind a branch that is never taken, cost
// 10 % at head dim 128.
template <class Traits>
struct ValueUnits {
  static constexpr float kLeast = 5.16987883e-26f;  // of the largest

  float ratio;    // by which O is to be multiplied for its units to be those of the next tile
  float unit;     // of O
  float largest;  // unit of a tile so far

  __device__ __forceinline__ void start() {
    if constexpr (Traits::kValueBlockScales) {
      unit = 1.0f;  // O is 0, in any units
      largest = 3.63797881e-12f;  // 2^-38: the least unit is then the least scale, 2^-122
    }
  }

  // The ratio for the tile whose scale is before that at `next_block`. A scale of NaN, whose codes are 0, is none:
  // fmaxf leaves it out.
  __device__ __forceinline__ float next(const FlashParams& p, int next_block) {
    if constexpr (!Traits::kValueBlockScales) return 1.0f;
    const float before = unit, of_tile = ptx::load_written(p.v_scale + next_block - 1);
    largest = fmaxf(largest, of_tile);
    unit = fmaxf(of_tile, largest * kLeast);
    return before * ptx::inverse(unit);
  }

  // Of O at the end. With scales of channels each column has its own instead, and this is 1.
  __device__ __forceinline__ float last(const FlashParams& p, int kv_head) const {
    if constexpr (Traits::kValueBlockScales) {
      return unit;
    } else if constexpr (!Traits::kChannelScales) {
      return p.v_scale[kv_head];
    }
    return 1.0f;
  }
};

}  // namespace greenfast

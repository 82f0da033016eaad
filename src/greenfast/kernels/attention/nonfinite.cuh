// Axis: numbers that are not finite.
//
// The quantizer writes a NaN scale and zero codes for a block of keys that holds such a number, so that it cannot reach
// other rows. NaN scores would not work: the half-precision exp2 loses them.
#pragma once

#include "attention/mask.cuh"

namespace greenfast {

// Per row of a thread's two: whether it attends to non-finite K (then O and LSE are NaN) or V (then O is NaN).
struct NonFiniteRows {
  bool scores[2], values[2];
};

// With kScheduled: finds them while the tiles of keys are processed. A tile has one block scale of K and one of V.
template <class Traits>
struct NonFiniteTracker {
  unsigned flags;  // for each row: whether it attends to any key, to non-finite K, and to non-finite V

  __device__ __forceinline__ void start() { flags = 0; }

  // keys, values: whether a tile's K and V are not finite. limits: its mask.
  template <TileMask kTileMask>
  __device__ __forceinline__ void add(bool keys, bool values, const typename Traits::Mask::Limits& limits) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      bool attends = true;
      if constexpr (kTileMask == TileMask::kBits) attends = limits[r] != 0;  // of this thread's columns
      if constexpr (kTileMask == TileMask::kEnd || kTileMask == TileMask::kBoth) attends = limits[r] > 0;
      if constexpr (kTileMask == TileMask::kBegin) attends = limits[2 + r] < Traits::kBlockN;
      if constexpr (kTileMask == TileMask::kBoth) attends &= limits[2 + r] < min(limits[r], Traits::kBlockN);
      if (attends) flags |= (1u | keys << 2 | values << 4) << r;
    }
  }

  // row_factors: of the thread's two rows, NaN if the row is not finite.
  __device__ __forceinline__ NonFiniteRows rows(float first_factor, float second_factor) const {
    const float row_factors[2] = {first_factor, second_factor};
    unsigned all = flags | __shfl_xor_sync(0xffffffffu, flags, 1);
    all |= __shfl_xor_sync(0xffffffffu, all, 2);
    NonFiniteRows found;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      found.scores[r] = (all >> (2 + r) & 1) || (row_factors[r] != row_factors[r] && (all >> r & 1));
      found.values[r] = all >> (4 + r) & 1;
    }
    return found;
  }
};

}  // namespace greenfast

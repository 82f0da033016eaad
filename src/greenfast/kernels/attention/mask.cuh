// Axis: the mask, and all limits that follow from it.
//
// A row attends to keys col_begin(row) .. col_limit(row) - 1; neither falls with the row. The key tiles of some rows are
// then, in this order: tiles with a mask (only with kWindow), tiles without one, tiles with a mask.
#pragma once

#include <math_constants.h>

#include "attention/seqlen.cuh"

namespace greenfast {

// The ends of the rows' key ranges that lie in a tile.
enum class MaskedEnds { kNone, kBegin, kEnd, kBoth };

// With kCausal, row i attends to no key after i + causal_shift, and with kWindow to none before i + window_shift.
template <class Sequence, bool kCausal, bool kWindow>
struct KeyMask {
  // Whether later rows have more keys. The scheduler then starts with them.
  static constexpr bool kLaterRowsAreLonger = kCausal;
  const Sequence& sequence;

  // One past the last key of a row; negative for some rows without a key.
  __device__ __forceinline__ int col_limit(int row) const {
    return kCausal ? min(sequence.kv_len(), row + 1 + sequence.causal_shift()) : sequence.kv_len();
  }

  // The first key of a row; possibly after the last one.
  __device__ __forceinline__ int col_begin(int row) const {
    return kWindow ? max(0, row + sequence.window_shift()) : 0;
  }

  // The tiles of kBlockN keys that rows first_row .. stop_row - 1 attend to: n_block_min(first_row) ..
  // n_block_max(stop_row) - 1.
  template <int kBlockN>
  __device__ __forceinline__ int n_block_min(int first_row) const {
    return col_begin(first_row) / kBlockN;
  }
  template <int kBlockN>
  __device__ __forceinline__ int n_block_max(int stop_row) const {
    return max(0, (col_limit(stop_row - 1) + kBlockN - 1) / kBlockN);
  }

  // One past the last tile before whose end no row below stop_row begins.
  template <int kBlockN>
  __device__ __forceinline__ int n_block_begun(int stop_row) const {
    return (col_begin(stop_row - 1) + kBlockN - 1) / kBlockN;
  }

  // One past the last tile that first_row, and hence all later rows, attends to up to its end.
  template <int kBlockN>
  __device__ __forceinline__ int n_block_unmasked(int first_row) const {
    return max(0, col_limit(first_row)) / kBlockN;
  }

  // Limits of a thread's two rows in a tile: col_limit of both and, with kWindow, col_begin of both, minus the tile's
  // first key.
  static constexpr int kLimits = kWindow ? 4 : 2;
  using Limits = int[kLimits];

  __device__ __forceinline__ void start_limits(Limits& limits, int row, int first_key) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      limits[r] = col_limit(row + 8 * r) - first_key;
      if constexpr (kWindow) limits[2 + r] = col_begin(row + 8 * r) - first_key;
    }
  }

  // Sets raw scores of masked keys of a tile to -inf. s: the thread's accumulators (layout: ptx/wgmma.cuh).
  template <MaskedEnds kEnds, int kCount>
  __device__ __forceinline__ static void apply(float (&s)[kCount], const Limits& limits) {
    const int column = threadIdx.x % 4 * 2;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if constexpr (kEnds != MaskedEnds::kBegin) {
        if (i / 4 * 8 + column + i % 2 >= limits[i / 2 % 2]) s[i] = -CUDART_INF_F;
      }
      if constexpr (kEnds != MaskedEnds::kEnd) {
        if (i / 4 * 8 + column + i % 2 < limits[2 + i / 2 % 2]) s[i] = -CUDART_INF_F;
      }
    }
  }
};

}  // namespace greenfast

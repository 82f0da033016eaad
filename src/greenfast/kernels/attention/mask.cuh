// Axis: the mask. Which keys a row attends to; all that follows from it is worked out here.
//
// A row attends to keys 0 .. row_end(row) - 1, and no later row to fewer. A window, which also has a first key, goes
// here: first_tile, whole_tiles and apply are what it changes, and Mainloop::run, which has tiles of all keys first.
#pragma once

#include <math_constants.h>

#include "attention/seqlen.cuh"

namespace greenfast {

// With kCausal, row i attends to keys 0 .. i + causal_shift; else to all.
template <bool kCausal>
struct KeyMask {
  // Whether later rows have more work, so that a scheduler should begin with them.
  static constexpr bool kLaterRowsAreLonger = kCausal;
  const Sequence& sequence;

  // The first key behind those of a row; negative for some rows without a key.
  __device__ __forceinline__ int row_end(int row) const {
    return kCausal ? min(sequence.kv_len(), row + 1 + sequence.p.causal_shift) : sequence.kv_len();
  }

  // Of tiles of kBlockN keys: the first, and the first behind those, that rows before `stop_row` attend to.
  static constexpr int first_tile = 0;
  template <int kBlockN>
  __device__ __forceinline__ int stop_tile(int stop_row) const {
    return max(0, (row_end(stop_row - 1) + kBlockN - 1) / kBlockN);
  }

  // How many tiles from first_tile on are attended to whole by `first_row` and all rows behind it.
  template <int kBlockN>
  __device__ __forceinline__ int whole_tiles(int first_row) const {
    return max(0, row_end(first_row)) / kBlockN;
  }

  // Leaves, of the raw scores of one tile in a warpgroup's accumulators (ptx/wgmma.cuh says which thread has which),
  // -inf for keys that their rows do not attend to, whatever the scale. end: row_end of the thread's two rows, counted
  // from the tile's first key.
  template <int kCount>
  __device__ __forceinline__ static void apply(float (&s)[kCount], const int (&end)[2]) {
    const int column = threadIdx.x % 4 * 2;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (i / 4 * 8 + column + i % 2 >= end[i / 2 % 2]) s[i] = -CUDART_INF_F;
    }
  }
};

}  // namespace greenfast

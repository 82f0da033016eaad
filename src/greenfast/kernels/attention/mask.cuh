// Axis: the mask, and all limits that follow from it.
//
// A row attends to keys 0 .. col_limit(row) - 1, and no later row to fewer. A window, which also has a first key, would
// change n_block_min, n_block_unmasked and apply, and Mainloop::run, which starts with unmasked tiles.
#pragma once

#include <math_constants.h>

#include "attention/seqlen.cuh"

namespace greenfast {

// With kCausal, row i attends to keys 0 .. i + causal_shift; else to all keys.
template <bool kCausal>
struct KeyMask {
  // Whether later rows have more keys. The scheduler then starts with them.
  static constexpr bool kLaterRowsAreLonger = kCausal;
  const Sequence& sequence;

  // One past the last key of a row; negative for some rows without a key.
  __device__ __forceinline__ int col_limit(int row) const {
    return kCausal ? min(sequence.kv_len(), row + 1 + sequence.p.causal_shift) : sequence.kv_len();
  }

  // The tiles of kBlockN keys that any row below stop_row attends to: n_block_min .. n_block_max(stop_row) - 1.
  static constexpr int n_block_min = 0;
  template <int kBlockN>
  __device__ __forceinline__ int n_block_max(int stop_row) const {
    return max(0, (col_limit(stop_row - 1) + kBlockN - 1) / kBlockN);
  }

  // The number of tiles from n_block_min on that first_row, and hence all later rows, attends to without a mask.
  template <int kBlockN>
  __device__ __forceinline__ int n_block_unmasked(int first_row) const {
    return max(0, col_limit(first_row)) / kBlockN;
  }

  // Sets raw scores of masked keys of a tile to -inf. s: the thread's accumulators (layout: ptx/wgmma.cuh). limit:
  // col_limit of the thread's two rows, minus the tile's first key.
  template <int kCount>
  __device__ __forceinline__ static void apply(float (&s)[kCount], const int (&limit)[2]) {
    const int column = threadIdx.x % 4 * 2;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (i / 4 * 8 + column + i % 2 >= limit[i / 2 % 2]) s[i] = -CUDART_INF_F;
    }
  }
};

}  // namespace greenfast

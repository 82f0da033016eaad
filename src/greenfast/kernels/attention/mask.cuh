// Axis: the mask, and all limits that follow from it.
//
// A row attends to keys col_begin(row) .. col_limit(row) - 1; neither falls with the row. The key tiles of some rows are
// then, in this order: tiles with a mask (only with kWindow), tiles without one, tiles with a mask.
#pragma once

#include <math_constants.h>

#include "attention/seqlen.cuh"

namespace greenfast {

// The mask of a tile: the ends of the rows' key ranges that lie in it, or a bit for each row and key.
enum class TileMask { kNone, kBegin, kEnd, kBoth, kBits };

// With kCausal, row i attends to no key after i + causal_shift, and with kWindow to none before i + window_shift. In a
// scheduled sequence its own shift is added to both.
template <class Sequence, bool kCausal, bool kWindow>
struct KeyMask {
  // Whether later rows have more keys. The scheduler then starts with them.
  static constexpr bool kLaterRowsAreLonger = kCausal;
  const Sequence& sequence;

  // One past the last key of a row; negative for some rows without a key.
  __device__ __forceinline__ int col_limit(int row) const {
    return kCausal ? min(sequence.kv_len(), row + 1 + (sequence.shift + sequence.p.causal_shift)) : sequence.kv_len();
  }

  // The first key of a row; possibly after the last one.
  __device__ __forceinline__ int col_begin(int row) const {
    return kWindow ? max(0, row + (sequence.shift + sequence.p.window_shift)) : 0;
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

  // One past the last tile in which the keys of some row below stop_row begin.
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
  template <TileMask kTileMask, int kCount>
  __device__ __forceinline__ static void apply(float (&s)[kCount], const Limits& limits) {
    const int column = threadIdx.x % 4 * 2;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if constexpr (kTileMask != TileMask::kBegin) {
        if (i / 4 * 8 + column + i % 2 >= limits[i / 2 % 2]) s[i] = -CUDART_INF_F;
      }
      if constexpr (kTileMask != TileMask::kEnd) {
        if (i / 4 * 8 + column + i % 2 < limits[2 + i / 2 % 2]) s[i] = -CUDART_INF_F;
      }
    }
  }
};

// With kListed: the tiles of a list; tiles with a mask come first (TileLists).
struct ListMask {
  static constexpr bool kLaterRowsAreLonger = false;
  // The bits of a thread's two rows for its quad's columns.
  static constexpr int kLimits = 2;
  using Limits = unsigned[kLimits];

  // row: the first of the two, in the tile. mask: the tile's index in the bits.
  __device__ __forceinline__ static void load(Limits& bits, const TileLists& lists, unsigned mask, int row) {
    const unsigned* const first = lists.bits + static_cast<long long>(mask) * kListedRows * 4 + threadIdx.x % 4;
#pragma unroll
    for (int r = 0; r < 2; ++r) bits[r] = first[(row + 8 * r) * 4];
  }

  template <TileMask, int kCount>
  __device__ __forceinline__ static void apply(float (&s)[kCount], const Limits& bits) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if ((bits[i / 2 % 2] >> (i / 4 * 2 + i % 2) & 1) == 0) s[i] = -CUDART_INF_F;
    }
  }
};

// The list of a work tile's rows. Whatever its numbers, it stays inside K and the bits.
struct TileList {
  int first_entry;    // index into the entries of all lists
  int masked, count;  // tiles with a mask, and all tiles

  __device__ __forceinline__ TileList(const FlashParams& p, int head, int first_row) {
    const int row_blocks = (p.q_len + kListedRows - 1) / kListedRows, tiles = key_tiles(p);
    const int plane = head / p.heads * p.lists.batch_step + (p.lists.heads == 1 ? 0 : head % p.heads);
    const int row = uniform(plane * row_blocks + first_row / kListedRows);
    const int2 counts = p.lists.counts[row];
    first_entry = row * tiles;
    masked = uniform(max(0, min(counts.x, tiles)));
    count = uniform(max(masked, min(masked + counts.y, tiles)));
  }

  // The number of a tile.
  __device__ __forceinline__ unsigned tile(const FlashParams& p, int i) const {
    return min(static_cast<unsigned>(p.lists.entries[first_entry + i].x), key_tiles(p) - 1u);
  }

  // Its index in the bits; of a tile with a mask.
  __device__ __forceinline__ unsigned mask(const FlashParams& p, int i) const {
    return min(static_cast<unsigned>(p.lists.entries[first_entry + i].y), p.lists.masks - 1u);
  }

 private:
  __device__ __forceinline__ static int key_tiles(const FlashParams& p) {
    return (p.kv_len + kRowBlock - 1) / kRowBlock;
  }
  // Shows the compiler that x is the same in all threads of a warp: this saves registers.
  __device__ __forceinline__ static int uniform(int x) { return __shfl_sync(__activemask(), x, 0); }
};

}  // namespace greenfast

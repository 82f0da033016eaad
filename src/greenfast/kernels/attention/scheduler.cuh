// Axis: the tile scheduler. Assigns work tiles to blocks.
//
// A work tile is Traits::kBlockM query rows of a head, with all of their keys. In each round a scheduler gives a block
// at most one tile, the same for all its warps: has(round) returns whether to go on; tile(round) returns the tile's
// number, to be skipped unless it is below `tiles`. Another order, or dynamic scheduling, goes here.
#pragma once

#include "attention/mask.cuh"

namespace greenfast {

// Traits: kBlockM, kBlockN and Mask.
template <class Traits>
struct WorkTile {
  int head;  // counted over the batch
  int first_row;
  int n_block_max;  // key tiles: Mask::n_block_min .. n_block_max - 1

  // Decodes a tile number. Tiles are numbered in groups of head_swizzle heads; if later rows have more keys, they come
  // first. Not forced inline: this gives the compiler a better instruction order.
  __device__ WorkTile(const FlashParams& p, int number) {
    using Mask = typename Traits::Mask;
    const int row_blocks = (p.q_len + Traits::kBlockM - 1) / Traits::kBlockM;
    const int per_group = row_blocks * p.head_swizzle;
    const int group = number / per_group, in_group = number % per_group;
    const int width = min(p.head_swizzle, p.heads - group * p.head_swizzle);
    const int block = in_group / width;
    head = group * p.head_swizzle + in_group % width;
    first_row = (Mask::kLaterRowsAreLonger ? row_blocks - 1 - block : block) * Traits::kBlockM;
    const Sequence sequence{p, head};
    const int stop_row = min(first_row + Traits::kBlockM, sequence.q_len());
    n_block_max = Mask{sequence}.template n_block_max<Traits::kBlockN>(stop_row);
  }
};

// Static persistent scheduler. The grid may have fewer blocks than work tiles. Every other round is reversed, so that
// no block always gets the longer tiles.
struct StaticScheduler {
  const int tiles;  // of all blocks

  __device__ __forceinline__ StaticScheduler(const FlashParams& p, int block_m)
      : tiles((p.q_len + block_m - 1) / block_m * p.heads) {}

  // Whether any block has a tile in this round.
  __device__ __forceinline__ bool has(int round) const { return round * static_cast<int>(gridDim.x) < tiles; }

  // The number of this block's tile; valid if below `tiles`.
  __device__ __forceinline__ int tile(int round) const {
    return round * gridDim.x + (round % 2 ? gridDim.x - 1 - blockIdx.x : blockIdx.x);
  }
};

}  // namespace greenfast

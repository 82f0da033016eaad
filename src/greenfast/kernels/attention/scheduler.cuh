// Axis: the scheduler. Which work tiles a block computes, and in which order.
//
// A work tile is Traits::kBlockM query rows of a head, with all of their keys. A scheduler says, round by round, which
// one a block has, the same to all warps that ask: has(round) whether to go on, tile(round) the tile's number, to be
// skipped where that is not below `tiles`. Another order of the numbers, or tiles that blocks fetch one by one, go
// here.
#pragma once

#include "attention/mask.cuh"

namespace greenfast {

// Traits: kBlockM, kBlockN and Mask.
template <class Traits>
struct WorkTile {
  int head;  // of the Sequence that its rows are of
  int first_row;
  int stop_tile;  // the first tile of keys behind those that the rows attend to, which begin with Mask::first_tile

  // The tile of that number, counted over `heads_at_once` heads at a time; where later rows have more keys, they come
  // first. Not forced inline: the compiler orders its arithmetic better.
  __device__ WorkTile(const FlashParams& p, int number) {
    using Mask = typename Traits::Mask;
    const int row_blocks = (p.q_len + Traits::kBlockM - 1) / Traits::kBlockM;
    const int per_group = row_blocks * p.heads_at_once;
    const int group = number / per_group, in_group = number % per_group;
    const int width = min(p.heads_at_once, p.heads - group * p.heads_at_once);
    const int block = in_group / width;
    head = group * p.heads_at_once + in_group % width;
    first_row = (Mask::kLaterRowsAreLonger ? row_blocks - 1 - block : block) * Traits::kBlockM;
    const Sequence sequence{p, head};
    const int stop_row = min(first_row + Traits::kBlockM, sequence.q_len());
    stop_tile = Mask{sequence}.template stop_tile<Traits::kBlockN>(stop_row);
  }
};

// A fixed division of the work tiles among the blocks of the grid, which may be fewer. Every other round goes backwards
// over the blocks, so that none gets the longer tiles each time.
struct StaticScheduler {
  const int tiles;  // of all blocks

  __device__ __forceinline__ StaticScheduler(const FlashParams& p, int block_m)
      : tiles((p.q_len + block_m - 1) / block_m * p.heads) {}

  // Whether any block has a tile in this round.
  __device__ __forceinline__ bool has(int round) const { return round * static_cast<int>(gridDim.x) < tiles; }

  // The number of this block's tile, which is there where that is below `tiles`.
  __device__ __forceinline__ int tile(int round) const {
    return round * gridDim.x + (round % 2 ? gridDim.x - 1 - blockIdx.x : blockIdx.x);
  }
};

}  // namespace greenfast

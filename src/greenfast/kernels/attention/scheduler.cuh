// Axis: the tile scheduler. Assigns work tiles to blocks.
//
// A work tile is Traits::kBlockM query rows of a head, with all of their keys. In each round a scheduler gives a block
// at most one tile, the same for all its warps: has(round) returns whether to go on; tile(round) returns the tile's
// number, to be skipped unless it is below `tiles`. Another order, or dynamic scheduling, goes here.
#pragma once

#include "attention/mask.cuh"

namespace greenfast {

// The first key tile of the rows from first_row on, at most n_block_max.
template <class Traits, class Head>
__device__ __forceinline__ int first_key_tile(const FlashParams& p, const Head& head, int first_row, int n_block_max) {
  if constexpr (!Traits::kWindow) return 0;
  const typename Traits::Sequence sequence{p, head};
  return min(n_block_max, typename Traits::Mask{sequence}.template n_block_min<Traits::kBlockN>(first_row));
}

// Traits: kBlockM, kBlockN and Mask.
template <class Traits, bool kScheduled = Traits::kScheduled>
struct WorkTile {
  int head;  // counted over the batch
  int first_row;
  int n_block_max;  // key tiles: n_block_min() .. n_block_max - 1

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

  // The number of work tiles of all heads.
  __device__ __forceinline__ static int count(const FlashParams& p) {
    return (p.q_len + Traits::kBlockM - 1) / Traits::kBlockM * p.heads;
  }

  __device__ __forceinline__ int n_block_min(const FlashParams& p) const {
    return first_key_tile<Traits>(p, head, first_row, n_block_max);
  }
};

// The same for a schedule's tiles, again for groups of head_swizzle heads.
template <class Traits>
struct WorkTile<Traits, true> {
  ScheduledSequence::Head head;
  int first_row;
  int n_block_max;

  __device__ __forceinline__ WorkTile(const FlashParams& p, int number) {
    const int row_blocks = *p.tile_count;
    const int per_group = row_blocks * p.head_swizzle;
    const int group = number / per_group, in_group = number % per_group;
    const int width = min(p.head_swizzle, p.heads - group * p.head_swizzle);
    head = {group * p.head_swizzle + in_group % width, p.tiles[in_group / width]};
    first_row = head.tile.first_row;
    if constexpr (Traits::kListed) {
      n_block_max = 0;
    } else {
      const ScheduledSequence sequence{p, head};
      const int stop_row = min(first_row + Traits::kBlockM, sequence.q_len());
      n_block_max = typename Traits::Mask{sequence}.template n_block_max<Traits::kBlockN>(stop_row);
    }
  }

  __device__ __forceinline__ static int count(const FlashParams& p) { return *p.tile_count * p.heads; }

  __device__ __forceinline__ int n_block_min(const FlashParams& p) const {
    return first_key_tile<Traits>(p, head, first_row, n_block_max);
  }
};

// Dynamic persistent scheduler of a schedule's tiles: a block takes its next tile when its producer has loaded the last
// one, so that blocks with short tiles take more of them. The producer thread passes the numbers on to the consumers.
template <class Traits, class Storage, bool kProducer>
struct DynamicScheduler {
  const FlashParams& p;
  Storage& shared;
  const int tiles;
  int taken;

  __device__ __forceinline__ DynamicScheduler(const FlashParams& p, Storage& shared)
      : p(p), shared(shared), tiles(WorkTile<Traits>::count(p)) {}

  __device__ __forceinline__ bool has(int round) {
    const int slot = round % 2;
    const unsigned parity = round / 2 % 2;
    if constexpr (kProducer) {
      taken = round == 0 ? blockIdx.x : gridDim.x + atomicAdd(p.tile_count + 1, 1);
      shared.next_empty[slot].wait(parity ^ 1);
      shared.next_tile[slot] = taken;
      shared.next_full[slot].arrive();
    } else {
      shared.next_full[slot].wait(parity);
      taken = shared.next_tile[slot];
      __syncwarp();
      if (threadIdx.x % 32 == 0) shared.next_empty[slot].arrive();
    }
    return taken < tiles;
  }

  __device__ __forceinline__ int tile(int) const { return taken; }
};

// Static persistent scheduler. The grid may have fewer blocks than work tiles. Every other round is reversed, so that
// no block always gets the longer tiles.
struct StaticScheduler {
  const int tiles;  // of all blocks

  // Whether any block has a tile in this round.
  __device__ __forceinline__ bool has(int round) const { return round * static_cast<int>(gridDim.x) < tiles; }

  // The number of this block's tile; valid if below `tiles`.
  __device__ __forceinline__ int tile(int round) const {
    return round * gridDim.x + (round % 2 ? gridDim.x - 1 - blockIdx.x : blockIdx.x);
  }
};

}  // namespace greenfast

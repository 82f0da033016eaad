// The division of a batch's work among blocks, made on the device from its lengths.
//
// A row tile is kRows rows of a sequence and a head of K and V: row r is query token r / group, of the head's group
// member r % group. With few tiles, or uneven ones, each block gets an equal run of chunks of keys, from wherever that
// begins ("stream-K", Osama et al., 2023); with many, whole tiles are dealt back and forth, those with most keys first.
// Neighbouring blocks have the same run, of neighbouring heads of K and V: what lies side by side in a page is read at
// about the same time.
#pragma once

#include "serving/params.cuh"

namespace greenfast::serving {

// One row tile, of every head of K and V.
struct RowTile {
  int sequence, first_row;
  int q_begin, q_len, kv_len;
  int key_begin, key_end;  // of all of its rows
  int first_unit;          // in the plan's order; a unit is a chunk of one head of those that a block may have

  __device__ __forceinline__ int first_chunk() const { return key_begin / kChunk; }
  // At least one: a tile without keys has its rows written too.
  __device__ __forceinline__ int chunks() const {
    return max(1, (key_end + kChunk - 1) / kChunk - first_chunk());
  }
  // How many runs of that many keys, which are a multiple of a tile, its keys touch.
  __device__ __forceinline__ int runs(int keys) const { return (key_end + keys - 1) / keys - key_begin / keys; }
  __device__ __forceinline__ int rows(int most, int group) const { return min(most, q_len * group - first_row); }
};

// What a block does: units begin .. end - 1, of which the first is of first_tile, a copy of which is `tile`. Or where
// tiles are dealt, its share of items 0 .. end - 1, a tile and a head each: one in every round, which has an item for
// each block.
struct alignas(16) Share {
  int first_tile, begin, end, dealt;
  RowTile tile;
};

// Views of the plan's memory: a header, then the shares of the blocks, then the tiles, then for each tile and head a
// counter.
struct Plan {
  enum { kTiles, kUnits, kDealt, kRuns, kWhole, kHeader = 8 };
  int* words;
  int blocks, most_tiles;
  int abreast;  // blocks that have the same run, each of its own heads; of kv_heads and of blocks a divisor

  __device__ __forceinline__ int tiles() const { return words[kTiles]; }
  __device__ __forceinline__ int units() const { return words[kUnits]; }
  // Runs that have units, and how many these would be if the last run were as long as the others.
  __device__ __forceinline__ int runs() const { return words[kRuns]; }
  __device__ __forceinline__ int whole() const { return words[kWhole]; }
  __device__ __forceinline__ Share* share(int block) const {
    return reinterpret_cast<Share*>(words + kHeader) + block;
  }
  __device__ __forceinline__ RowTile* tile(int t) const {
    return static_cast<RowTile*>(__builtin_assume_aligned(reinterpret_cast<RowTile*>(share(blocks)) + t, 16));
  }
  // How many units of a tile and head are done, and when all are, how many blocks know it; 0 once all of these do, for
  // the next launch.
  __device__ __forceinline__ unsigned* done(int t, int head, int kv_heads) const {
    return reinterpret_cast<unsigned*>(tile(most_tiles)) + t * kv_heads + head;
  }
  // Of a product, which is seldom beyond 32 bits.
  __device__ __forceinline__ static int quotient(long long x, int y) {
    if (x >> 32 == 0) return static_cast<unsigned>(x) / static_cast<unsigned>(y);
    return static_cast<int>(x / y);
  }
  // Where a run begins, and which run has a unit.
  __device__ __forceinline__ static int begin_of(int run, int runs, long long whole) {
    return quotient(run * whole, runs);
  }
  __device__ __forceinline__ static int run_of(int unit, int runs, int whole) {
    return quotient((unit + 1LL) * runs - 1, whole);
  }
};

// Sums over a block of kPlanThreads threads, up to and including each thread's.
__device__ __forceinline__ long long inclusive_sum(long long x, long long (&warps)[32]) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  for (int step = 1; step < 32; step *= 2) {
    const long long before = __shfl_up_sync(0xffffffffu, x, step);
    x += lane >= step ? before : 0;
  }
  __syncthreads();
  if (lane == 31) warps[warp] = x;
  __syncthreads();
  if (warp == 0) {
    long long sum = warps[lane];
    for (int step = 1; step < 32; step *= 2) {
      const long long before = __shfl_up_sync(0xffffffffu, sum, step);
      sum += lane >= step ? before : 0;
    }
    warps[lane] = sum;
  }
  __syncthreads();
  return x + (warp > 0 ? warps[warp - 1] : 0);
}

constexpr int kPlanThreads = 1024;

template <int kRows>
__device__ __forceinline__ RowTile row_tile(const Batch& batch, int sequence, int index) {
  RowTile tile;
  tile.sequence = sequence;
  tile.first_row = index * kRows;
  tile.q_begin = batch.q_begins[sequence];
  tile.q_len = batch.q_begins[sequence + 1] - tile.q_begin;
  tile.kv_len = max(0, batch.kv_lens[sequence]);
  const int last_row = tile.first_row + tile.rows(kRows, batch.group) - 1;
  tile.key_begin = batch.key_begin(batch.token(tile.first_row), tile.q_len, tile.kv_len);
  tile.key_end = max(tile.key_begin, batch.key_end(batch.token(last_row), tile.q_len, tile.kv_len));
  return tile;
}

// Calls visit for each row tile of the batch; each sequence gets as many threads as there are for it, rounded down to
// a power of two. most_tiles: of the batch. More of a sequence, which then has more queries than was said, are left out:
// there is no memory for them.
template <int kRows, class Visit>
__device__ __forceinline__ void for_each_tile(const Batch& batch, int most_tiles, const Visit& visit) {
  const int most = batch.sequences > 0 ? most_tiles / batch.sequences : 0;
  int together = kPlanThreads;
  while (together > 1 && together * batch.sequences > kPlanThreads) together /= 2;
  const int step = kPlanThreads / together;
  for (int sequence = threadIdx.x / together; sequence < batch.sequences; sequence += step) {
    const int rows = (batch.q_begins[sequence + 1] - batch.q_begins[sequence]) * batch.group;
    for (int index = threadIdx.x % together; index < most && index * kRows < rows; index += together) {
      visit(row_tile<kRows>(batch, sequence, index));
    }
  }
}

// Where whole tiles are dealt: the item of a block in a round.
__device__ __forceinline__ int dealt_item(int round, int block, int blocks) {
  return round * blocks + (round % 2 == 0 ? block : blocks - 1 - block);
}

// One block of kPlanThreads threads. blocks: of the attention kernel's grid. kSortedKeys: row tiles come in the order of
// how many runs of that many keys they have. Those of a sequence stay together in a run, so few sequences' keys are
// read at a time.
template <int kRows, int kSortedKeys>
__device__ __forceinline__ void make_plan(const Batch& batch, int* words, int blocks, int kv_heads, int most_tiles,
                                          int abreast, int slots) {
  constexpr int kThreads = kPlanThreads, kClasses = kThreads;
  __shared__ long long warps[32], carry;
  __shared__ int classes[kClasses], most_chunks, longest;
  const Plan plan{words, blocks, most_tiles, abreast};
  const int thread = threadIdx.x;
  for (int i = thread; i < kClasses; i += kThreads) classes[i] = 0;
  if (thread == 0) carry = most_chunks = longest = 0;
  __syncthreads();
  const auto class_of = [](const RowTile& tile) {
    return kClasses - min(max(1, tile.runs(kSortedKeys)), kClasses);
  };
  // How many tiles there are of each class; those with most keys come first.
  for_each_tile<kRows>(batch, most_tiles, [&](const RowTile& tile) {
    atomicAdd(&classes[class_of(tile)], 1);
    atomicMax(&most_chunks, tile.chunks());
  });
  __syncthreads();
  const int in_class = classes[thread], behind = static_cast<int>(inclusive_sum(in_class, warps));
  classes[thread] = behind - in_class;
  if (thread == kThreads - 1) words[Plan::kTiles] = behind;
  __syncthreads();
  for_each_tile<kRows>(batch, most_tiles, [&](const RowTile& tile) {
    *plan.tile(atomicAdd(&classes[class_of(tile)], 1)) = tile;
  });
  __syncthreads();
  const int tiles = plan.tiles();
  for (int first = 0; first < tiles; first += kThreads) {
    const int t = first + thread;
    const long long units = t < tiles ? static_cast<long long>(plan.tile(t)->chunks()) * (kv_heads / abreast) : 0;
    const long long begin = carry, end = inclusive_sum(units, warps);
    if (t < tiles) plan.tile(t)->first_unit = static_cast<int>(begin + end - units);
    __syncthreads();
    if (thread == kThreads - 1) carry = begin + end;
    __syncthreads();
  }
  const long long units = carry;
  const int most_runs = blocks / abreast;
  const long long share = max(1LL, (units + most_runs - 1) / most_runs), most = most_chunks;
  // Runs have the same number of units but for the last, which may leave a few blocks without any: sequences are then
  // seldom cut, as their chunks are often a multiple of it or the other way around. Where it would leave many, runs differ
  // by one. With fewer units than blocks, the blocks that come first have one each: they are on multiprocessors of their
  // own.
  const int needed = Plan::quotient(units + share - 1, static_cast<int>(share));
  const bool same = share == 1 || 16 * needed >= 15 * most_runs;
  const int runs = max(1, same ? needed : most_runs);
  const long long whole = max(1LL, same ? runs * share : units);
  // Dealt where that takes little longer than equal runs: at most an eighth. A block has at most one of the longest tiles
  // more than the others, so where a share is eight of these nothing is to be counted.
  const bool even = share >= 8 * most;
  if (!even && most * 8 <= share * 9) {
    for (int block = thread; block < blocks; block += kThreads) {
      int chunks = 0;
      for (int round = 0;; ++round) {
        const int item = dealt_item(round, block, blocks);
        if (item >= tiles * kv_heads) break;
        chunks += plan.tile(item / kv_heads)->chunks();
      }
      atomicMax(&longest, chunks);
    }
  }
  __syncthreads();
  if (thread == 0) {
    // Dealt too where runs would leave more partial results than there is room for, or an int does not count the units.
    constexpr long long kMostUnits = 0x7fffffff;
    const bool room = whole <= kMostUnits && (share <= slots || most <= slots);
    words[Plan::kUnits] = static_cast<int>(units <= kMostUnits ? units : kMostUnits);
    words[Plan::kRuns] = runs;
    words[Plan::kWhole] = static_cast<int>(whole <= kMostUnits ? whole : kMostUnits);
    words[Plan::kDealt] = !room || even || (longest > 0 && longest * 8LL <= share * 9);
  }
  for (int i = thread; i < tiles * kv_heads; i += kThreads) plan.done(0, 0, kv_heads)[i] = 0;
  __syncthreads();
  for (int block = thread; block < blocks; block += kThreads) {
    Share share;
    if (words[Plan::kDealt]) {
      share = {block / kv_heads, 0, tiles * kv_heads, 1, {}};
    } else {
      const auto begin_of = [&](int run) { return min(static_cast<int>(units), Plan::begin_of(run, runs, whole)); };
      const int run = block / abreast, unit = begin_of(run);
      int low = 0, high = tiles;  // the last tile that begins at or before it
      while (low + 1 < high) {
        const int middle = (low + high) / 2;
        (plan.tile(middle)->first_unit <= unit ? low : high) = middle;
      }
      share = {low, unit, begin_of(run + 1), 0, {}};
    }
    if (share.first_tile < tiles) share.tile = *plan.tile(share.first_tile);
    *plan.share(block) = share;
  }
}

// What a block does at a time: a row tile of a head, and its chunks begin .. end - 1, counted from the tile's first.
struct Work {
  RowTile tile;
  int index, head;  // of the tile in the plan, and of K and V
  int begin, end, chunks;

  __device__ __forceinline__ bool whole() const { return end - begin == chunks; }
  __device__ __forceinline__ int key_begin() const {
    return max(tile.key_begin, (tile.first_chunk() + begin) * kChunk);
  }
  __device__ __forceinline__ int key_end() const { return min(tile.key_end, (tile.first_chunk() + end) * kChunk); }
  __device__ __forceinline__ int first_tile() const { return key_begin() / kTile; }
  __device__ __forceinline__ int stop_tile() const { return (key_end() + kTile - 1) / kTile; }
};

// A work that is a part of its row tile, and where the results of all parts are. Result 0 is the first block's, of all of
// its chunks; the others are of a chunk each.
struct Piece {
  Work work;
  int whole, runs, abreast;         // the plan's
  int run, place;                   // this block's, and its place among those that have the same run
  int first_run, next_unit;         // the run that has the row tile's first unit, and the unit behind that run
  int results, blocks;              // of the row tile

  __device__ __forceinline__ void find(const Plan& plan, const Work& of) {
    work = of;
    whole = plan.whole();
    runs = plan.runs();
    abreast = plan.abreast;
    run = blockIdx.x / abreast;
    place = blockIdx.x % abreast;
    const int first_unit = of.tile.first_unit + of.head / abreast * of.chunks, stop = first_unit + of.chunks;
    first_run = Plan::run_of(first_unit, runs, whole);
    next_unit = Plan::begin_of(first_run + 1, runs, whole);
    results = stop - next_unit + 1;
    blocks = Plan::run_of(stop - 1, runs, whole) - first_run + 1;
  }

  // Of the memory for partial results, where each block has room for those of `slots` chunks and one more.
  __device__ __forceinline__ int slot(int result, int slots) const {
    const int unit = next_unit + result - 1, of = result == 0 ? first_run : Plan::run_of(unit, runs, whole);
    return (of * abreast + place) * (slots + 1) +
           (result == 0 ? slots : min(unit - Plan::begin_of(of, runs, whole), slots));
  }
};

// The work of a block, one after the other.
struct Schedule {
  int dealt;
  int next, stop;  // dealt: the round, and all items; else units
  int t;           // the tile of `next`
  RowTile tile;    // read ahead

  __device__ __forceinline__ void start(const Plan& plan) {
    const Share share = *plan.share(blockIdx.x);
    dealt = share.dealt;
    next = share.begin;
    stop = share.end;
    t = share.first_tile;
    tile = share.tile;
  }

  __device__ __forceinline__ bool get(const Plan& plan, int kv_heads, Work& work) {
    work.index = t;
    work.tile = tile;
    work.chunks = tile.chunks();
    if (dealt) {
      const int now = dealt_item(next, blockIdx.x, gridDim.x), later = dealt_item(next + 1, blockIdx.x, gridDim.x);
      ++next;
      if (now >= stop) return false;  // no later round has any
      work.head = now % kv_heads;
      work.begin = 0;
      work.end = work.chunks;
      t = later / kv_heads;
      if (later < stop) tile = *plan.tile(t);
      return true;
    }
    if (next >= stop) return false;
    const int from = next - tile.first_unit, turn = from / work.chunks;  // of the heads that the block may have
    work.head = turn * plan.abreast + blockIdx.x % plan.abreast;
    work.begin = from - turn * work.chunks;
    work.end = min(work.chunks, work.begin + stop - next);
    next += work.end - work.begin;
    if (work.end == work.chunks && (turn + 1) * plan.abreast == kv_heads) {
      ++t;
      if (next < stop) tile = *plan.tile(t);
    }
    return true;
  }
};

}  // namespace greenfast::serving

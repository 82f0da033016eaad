// Divides a batch's work among blocks (CTAs), on the device, from the sequences' lengths.
//
// A row tile has kRows rows of one sequence and one KV head. Row r is query token r / group and query head r % group of
// the KV head's group. If there are few row tiles, or uneven ones, each block gets an equal number of consecutive
// chunks of keys, called a split ("stream-K", Osama et al., 2023). If there are many, whole row tiles go to the blocks
// round-robin, in alternating order, those with most keys first. Neighbouring blocks process the same split for
// neighbouring KV heads, so data that is adjacent in a page is read at about the same time.
#pragma once

#include "serving/params.cuh"

namespace greenfast::serving {

// A row tile. The plan stores it once for all KV heads.
struct RowTile {
  int sequence, first_row;
  int q_begin, q_len, kv_len;
  int key_begin, key_end;  // union of the key ranges of its rows
  int first_k_chunk;       // index of its first chunk in the plan's order, counted for kv_heads / parallel_heads heads

  __device__ __forceinline__ int first_chunk() const { return key_begin / kChunk; }
  // At least 1, because the rows of a tile without keys are written too.
  __device__ __forceinline__ int chunks() const { return max(1, (key_end + kChunk - 1) / kChunk - first_chunk()); }
  // Number of aligned spans of `keys` keys that its key range touches. keys: a multiple of kBlockN.
  __device__ __forceinline__ int key_spans(int keys) const { return (key_end + keys - 1) / keys - key_begin / keys; }
  __device__ __forceinline__ int rows(int max_rows, int group) const {
    return min(max_rows, q_len * group - first_row);
  }
};

// The work of a block: chunks begin .. end - 1 in the plan's order. The first one belongs to row tile first_tile;
// `tile` is a copy of that row tile. With round_robin: the block's items (row tile, head) out of 0 .. end - 1, one in
// every round of gridDim.x items.
struct alignas(16) WorkRange {
  int first_tile, begin, end, round_robin;
  RowTile tile;
};

// The plan's memory: a header, the work ranges of the blocks, the row tiles, and a counter for each row tile and head.
struct Plan {
  enum { kRowTiles, kKChunks, kRoundRobin, kSplits, kPaddedKChunks, kHeader = 8 };
  int* words;
  int blocks, max_tiles;
  int parallel_heads;  // neighbouring blocks with the same split, one per KV head; divides kv_heads and blocks

  __device__ __forceinline__ int tiles() const { return words[kRowTiles]; }
  __device__ __forceinline__ int k_chunks() const { return words[kKChunks]; }
  // Number of splits, and their total length in chunks if the last one were as long as the others.
  __device__ __forceinline__ int splits() const { return words[kSplits]; }
  __device__ __forceinline__ int padded_k_chunks() const { return words[kPaddedKChunks]; }
  __device__ __forceinline__ WorkRange* work_range(int block) const {
    return reinterpret_cast<WorkRange*>(words + kHeader) + block;
  }
  __device__ __forceinline__ RowTile* tile(int t) const {
    return static_cast<RowTile*>(__builtin_assume_aligned(reinterpret_cast<RowTile*>(work_range(blocks)) + t, 16));
  }
  // Counter of a row tile and head: the finished chunks, and after that the blocks that have seen the last one. It is 0
  // again when all blocks have seen it, for the next launch.
  __device__ __forceinline__ unsigned* done(int t, int head, int kv_heads) const {
    return reinterpret_cast<unsigned*>(tile(max_tiles)) + t * kv_heads + head;
  }
  // x / y. The dividend seldom needs more than 32 bits.
  __device__ __forceinline__ static int quotient(long long x, int y) {
    if (x >> 32 == 0) return static_cast<unsigned>(x) / static_cast<unsigned>(y);
    return static_cast<int>(x / y);
  }
  // The first chunk of a split, and the split of a chunk.
  __device__ __forceinline__ static int split_begin(int split, int splits, long long padded_k_chunks) {
    return quotient(split * padded_k_chunks, splits);
  }
  __device__ __forceinline__ static int split_of(int k_chunk, int splits, int padded_k_chunks) {
    return quotient((k_chunk + 1LL) * splits - 1, padded_k_chunks);
  }
};

// Inclusive prefix sum over the kPlanThreads threads of a block.
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

// Calls visit(tile) for each row tile of the batch. The threads are shared evenly by the sequences, in powers of two.
// max_tiles: row tiles that the plan has room for. The excess row tiles of a sequence that is longer than max_q_len are
// dropped.
template <int kRows, class Visit>
__device__ __forceinline__ void for_each_tile(const Batch& batch, int max_tiles, const Visit& visit) {
  const int max_tile_chunks = batch.sequences > 0 ? max_tiles / batch.sequences : 0;
  int threads_per_sequence = kPlanThreads;
  while (threads_per_sequence > 1 && threads_per_sequence * batch.sequences > kPlanThreads) threads_per_sequence /= 2;
  const int step = kPlanThreads / threads_per_sequence;
  for (int sequence = threadIdx.x / threads_per_sequence; sequence < batch.sequences; sequence += step) {
    const int rows = (batch.q_begins[sequence + 1] - batch.q_begins[sequence]) * batch.group;
    for (int index = threadIdx.x % threads_per_sequence; index < max_tile_chunks && index * kRows < rows;
         index += threads_per_sequence) {
      visit(row_tile<kRows>(batch, sequence, index));
    }
  }
}

// The item of a block in a round of the round-robin schedule.
__device__ __forceinline__ int round_robin_item(int round, int block, int blocks) {
  return round * blocks + (round % 2 == 0 ? block : blocks - 1 - block);
}

// Makes the plan. Run by one block of kPlanThreads threads. blocks: grid size of the attention kernel. kSortedKeys: row
// tiles are sorted by the number of spans of that many keys, longest first. Row tiles of a sequence with equal numbers
// stay together, so that few sequences' keys are read at a time.
template <int kRows, int kSortedKeys>
__device__ __forceinline__ void make_plan(const Batch& batch, int* words, int blocks, int kv_heads, int max_tiles,
                                          int parallel_heads, int slots) {
  constexpr int kThreads = kPlanThreads, kClasses = kThreads;
  __shared__ long long warps[32], carry;
  __shared__ int classes[kClasses], max_chunks, max_load;
  const Plan plan{words, blocks, max_tiles, parallel_heads};
  const int thread = threadIdx.x;
  for (int i = thread; i < kClasses; i += kThreads) classes[i] = 0;
  if (thread == 0) carry = max_chunks = max_load = 0;
  __syncthreads();
  const auto class_of = [](const RowTile& tile) {
    return kClasses - min(max(1, tile.key_spans(kSortedKeys)), kClasses);
  };
  // Count the row tiles of each class. The first class has the most keys.
  for_each_tile<kRows>(batch, max_tiles, [&](const RowTile& tile) {
    atomicAdd(&classes[class_of(tile)], 1);
    atomicMax(&max_chunks, tile.chunks());
  });
  __syncthreads();
  const int in_class = classes[thread], inclusive = static_cast<int>(inclusive_sum(in_class, warps));
  classes[thread] = inclusive - in_class;
  if (thread == kThreads - 1) words[Plan::kRowTiles] = inclusive;
  __syncthreads();
  for_each_tile<kRows>(batch, max_tiles,
                       [&](const RowTile& tile) { *plan.tile(atomicAdd(&classes[class_of(tile)], 1)) = tile; });
  __syncthreads();
  const int tiles = plan.tiles();
  for (int first = 0; first < tiles; first += kThreads) {
    const int t = first + thread;
    const long long k_chunks =
        t < tiles ? static_cast<long long>(plan.tile(t)->chunks()) * (kv_heads / parallel_heads) : 0;
    const long long begin = carry, end = inclusive_sum(k_chunks, warps);
    if (t < tiles) plan.tile(t)->first_k_chunk = static_cast<int>(begin + end - k_chunks);
    __syncthreads();
    if (thread == kThreads - 1) carry = begin + end;
    __syncthreads();
  }
  const long long k_chunks = carry;
  const int max_splits = blocks / parallel_heads;
  const long long k_chunks_per_split = max(1LL, (k_chunks + max_splits - 1) / max_splits), max_tile_chunks = max_chunks;
  // All splits have the same length, except the last one. A few blocks may be idle. Sequences are then seldom cut,
  // because their numbers of chunks are often a multiple of the split length, or the reverse. If many blocks would be
  // idle, the lengths of splits differ by one instead. If there are fewer chunks than blocks, the first blocks get one
  // each: they run on different multiprocessors.
  const int needed = Plan::quotient(k_chunks + k_chunks_per_split - 1, static_cast<int>(k_chunks_per_split));
  const bool equal_splits = k_chunks_per_split == 1 || 16 * needed >= 15 * max_splits;
  const int splits = max(1, equal_splits ? needed : max_splits);
  const long long padded_k_chunks = max(1LL, equal_splits ? splits * k_chunks_per_split : k_chunks);
  // Use round-robin if its longest block takes at most 9/8 of the time of equal splits. A block gets at most one of the
  // longest tiles more than the others, so nothing needs to be counted if a split is as long as eight of them.
  const bool balanced = k_chunks_per_split >= 8 * max_tile_chunks;
  if (!balanced && max_tile_chunks * 8 <= k_chunks_per_split * 9) {
    for (int block = thread; block < blocks; block += kThreads) {
      int chunks = 0;
      for (int round = 0;; ++round) {
        const int item = round_robin_item(round, block, blocks);
        if (item >= tiles * kv_heads) break;
        chunks += plan.tile(item / kv_heads)->chunks();
      }
      atomicMax(&max_load, chunks);
    }
  }
  __syncthreads();
  if (thread == 0) {
    // Round-robin too if splits would write more partial results than fit, or if the number of chunks overflows an int.
    constexpr long long kMaxKChunks = 0x7fffffff;
    const bool room = padded_k_chunks <= kMaxKChunks && (k_chunks_per_split <= slots || max_tile_chunks <= slots);
    words[Plan::kKChunks] = static_cast<int>(k_chunks <= kMaxKChunks ? k_chunks : kMaxKChunks);
    words[Plan::kSplits] = splits;
    words[Plan::kPaddedKChunks] = static_cast<int>(padded_k_chunks <= kMaxKChunks ? padded_k_chunks : kMaxKChunks);
    words[Plan::kRoundRobin] = !room || balanced || (max_load > 0 && max_load * 8LL <= k_chunks_per_split * 9);
  }
  for (int i = thread; i < tiles * kv_heads; i += kThreads) plan.done(0, 0, kv_heads)[i] = 0;
  __syncthreads();
  for (int block = thread; block < blocks; block += kThreads) {
    WorkRange range;
    if (words[Plan::kRoundRobin]) {
      range = {block / kv_heads, 0, tiles * kv_heads, 1, {}};
    } else {
      const auto split_begin = [&](int split) {
        return min(static_cast<int>(k_chunks), Plan::split_begin(split, splits, padded_k_chunks));
      };
      const int split = block / parallel_heads, k_chunk = split_begin(split);
      int low = 0, high = tiles;  // binary search for the last row tile that begins at or before k_chunk
      while (low + 1 < high) {
        const int middle = (low + high) / 2;
        (plan.tile(middle)->first_k_chunk <= k_chunk ? low : high) = middle;
      }
      range = {low, k_chunk, split_begin(split + 1), 0, {}};
    }
    if (range.first_tile < tiles) range.tile = *plan.tile(range.first_tile);
    *plan.work_range(block) = range;
  }
}

// A work item of a block: chunks begin .. end - 1 of a row tile for one KV head, counted from the tile's first chunk.
struct Work {
  RowTile tile;
  int index, head;  // index: the row tile's in the plan; head: the KV head
  int begin, end, chunks;

  __device__ __forceinline__ bool covers_tile() const { return end - begin == chunks; }
  __device__ __forceinline__ int key_begin() const {
    return max(tile.key_begin, (tile.first_chunk() + begin) * kChunk);
  }
  __device__ __forceinline__ int key_end() const { return min(tile.key_end, (tile.first_chunk() + end) * kChunk); }
  __device__ __forceinline__ int n_block_min() const { return key_begin() / kBlockN; }
  __device__ __forceinline__ int n_block_max() const { return (key_end() + kBlockN - 1) / kBlockN; }
};

// A work item that is one split of its row tile, and the locations of the partial results of all splits. Result 0 holds
// all chunks of the first split; each of the others holds one chunk.
struct SplitWork {
  Work work;
  int padded_k_chunks, splits, parallel_heads;  // copied from the plan
  int split, head_index;                        // this block's split, and its index among the blocks with that split
  int first_split, next_k_chunk;  // the split of the row tile's first chunk, and the first chunk after that split
  int results, blocks;            // that contribute to the row tile

  __device__ __forceinline__ void find(const Plan& plan, const Work& of) {
    work = of;
    padded_k_chunks = plan.padded_k_chunks();
    splits = plan.splits();
    parallel_heads = plan.parallel_heads;
    split = blockIdx.x / parallel_heads;
    head_index = blockIdx.x % parallel_heads;
    const int first_k_chunk = of.tile.first_k_chunk + of.head / parallel_heads * of.chunks,
              stop = first_k_chunk + of.chunks;
    first_split = Plan::split_of(first_k_chunk, splits, padded_k_chunks);
    next_k_chunk = Plan::split_begin(first_split + 1, splits, padded_k_chunks);
    results = stop - next_k_chunk + 1;
    blocks = Plan::split_of(stop - 1, splits, padded_k_chunks) - first_split + 1;
  }

  // The slot of a partial result. Each block owns slots + 1 of them, the last one for a result 0.
  __device__ __forceinline__ int slot(int result, int slots) const {
    const int k_chunk = next_k_chunk + result - 1,
              of = result == 0 ? first_split : Plan::split_of(k_chunk, splits, padded_k_chunks);
    return (of * parallel_heads + head_index) * (slots + 1) +
           (result == 0 ? slots : min(k_chunk - Plan::split_begin(of, splits, padded_k_chunks), slots));
  }
};

// Iterates over the work items of a block.
struct WorkScheduler {
  int round_robin;
  int next, stop;  // round-robin: the round, and the number of items; else chunks
  int t;           // the tile of `next`
  RowTile tile;    // read ahead

  __device__ __forceinline__ void start(const Plan& plan) {
    const WorkRange range = *plan.work_range(blockIdx.x);
    round_robin = range.round_robin;
    next = range.begin;
    stop = range.end;
    t = range.first_tile;
    tile = range.tile;
  }

  __device__ __forceinline__ bool next_work(const Plan& plan, int kv_heads, Work& work) {
    work.index = t;
    work.tile = tile;
    work.chunks = tile.chunks();
    if (round_robin) {
      const int item = round_robin_item(next, blockIdx.x, gridDim.x),
                next_item = round_robin_item(next + 1, blockIdx.x, gridDim.x);
      ++next;
      if (item >= stop) return false;  // no later round has any
      work.head = item % kv_heads;
      work.begin = 0;
      work.end = work.chunks;
      t = next_item / kv_heads;
      if (next_item < stop) tile = *plan.tile(t);
      return true;
    }
    if (next >= stop) return false;
    const int offset = next - tile.first_k_chunk,
              head_group = offset / work.chunks;  // of kv_heads / parallel_heads groups
    work.head = head_group * plan.parallel_heads + blockIdx.x % plan.parallel_heads;
    work.begin = offset - head_group * work.chunks;
    work.end = min(work.chunks, work.begin + stop - next);
    next += work.end - work.begin;
    if (work.end == work.chunks && (head_group + 1) * plan.parallel_heads == kv_heads) {
      ++t;
      if (next < stop) tile = *plan.tile(t);
    }
    return true;
  }
};

}  // namespace greenfast::serving

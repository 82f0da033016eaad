// The schedule: the work tiles of the attention kernel by descending work. Made on the device, so that the host need not
// know any length or mask. A source of sequences says which rows and keys each sequence has: PackedSequences or
// BatchSequences.
#pragma once

#include "attention/params.cuh"
#include "common/scale_blocks.cuh"
#include "ptx/griddepcontrol.cuh"

namespace greenfast {

struct ScheduleParams {
  int batch;  // sequences
  int block_m, block_n;
  int causal, causal_shift, window, window_shift;  // as of the attention kernel
  ScheduledTile* tiles;
  int max_tiles;
  int* tile_count;  // two numbers, as in FlashParams
};

__device__ __forceinline__ int clamp(int x, int low, int high) { return max(low, min(x, high)); }

// A sequence's keys: its first row in K, its first row in the codes, and its length.
struct alignas(16) PackedKeys {
  int first_input_row, first_key, kv_len, padding;
};

// Sequences of several lengths, one after another in Q, K and V. Masks are aligned at the last row and key of each.
//
// The codes of K and V of a sequence begin at a multiple of kRowBlock. If the keys of sequence b begin at row r of K,
// its codes begin at (r + b * kRowBlock) / kRowBlock * kRowBlock. That leaves room for the last block of each sequence
// before it, whatever the lengths, without a prefix sum (as FlashAttention-3 places its padded gradients).
struct PackedSequences {
  const int *cu_seqlens_q, *cu_seqlens_k;  // (batch + 1)
  const int* seqused_k;                    // (batch), or null: all keys
  int q_rows, k_rows;                      // rows of Q and of K: no sequence reaches beyond them, whatever its numbers
  PackedKeys* sequences;                   // (batch), for the quantizer
  int* block_sequence;                     // (key_blocks): the sequence of each block of codes, or -1
  int key_blocks;

  __device__ __forceinline__ int first_input_row(int b) const { return clamp(cu_seqlens_k[b], 0, k_rows); }

  __device__ __forceinline__ ScheduledTile operator()(int b) const {
    const int first_q_row = clamp(cu_seqlens_q[b], 0, q_rows), first_row = first_input_row(b);
    const int q_len = clamp(cu_seqlens_q[b + 1], first_q_row, q_rows) - first_q_row;
    int kv_len = clamp(cu_seqlens_k[b + 1], first_row, k_rows) - first_row;
    if (seqused_k != nullptr) kv_len = clamp(seqused_k[b], 0, kv_len);
    return {first_q_row, q_len, (first_row + b * kRowBlock) / kRowBlock * kRowBlock, kv_len, 0, 0, kv_len - q_len, 0};
  }

  __device__ __forceinline__ void start() const {
    for (int i = threadIdx.x; i < key_blocks; i += blockDim.x) block_sequence[i] = -1;
  }

  // Writes what the quantizer reads. Called by a warp for each sequence.
  __device__ __forceinline__ void write(int b, const ScheduledTile& x) const {
    if (threadIdx.x % 32 == 0) sequences[b] = {first_input_row(b), x.first_key, x.kv_len, 0};
    const int first_block = x.first_key / kRowBlock, blocks = (x.kv_len + kRowBlock - 1) / kRowBlock;
    for (int i = threadIdx.x % 32; i < blocks; i += 32) block_sequence[first_block + i] = b;
  }
};

// The sequences of a batch: each head has q_len rows of Q, and all or the first of kv_len keys.
struct BatchSequences {
  const int* kv_lengths;  // (batch), or null: kv_len
  int heads, q_len, kv_len, shift;

  __device__ __forceinline__ ScheduledTile operator()(int b) const {
    return {0, q_len, 0, kv_lengths == nullptr ? kv_len : clamp(kv_lengths[b], 0, kv_len), 0, b * heads, shift, 0};
  }
  __device__ __forceinline__ void start() const {}
  __device__ __forceinline__ void write(int, const ScheduledTile&) const {}
};

// The key tiles of a work tile under the masks of FlashParams. tile: with its first row.
struct LimitedKeys {
  __device__ __forceinline__ int operator()(const ScheduleParams& p, int, const ScheduledTile& tile) const {
    const int stop_row = min(tile.first_row + p.block_m, tile.q_len);
    const int end = p.causal ? clamp(stop_row + tile.shift + p.causal_shift, 0, tile.kv_len) : tile.kv_len;
    const int begin = p.window ? clamp(tile.first_row + tile.shift + p.window_shift, 0, end) : 0;
    return (end + p.block_n - 1) / p.block_n - begin / p.block_n;
  }
};

// The mean number of key tiles over the heads' lists.
struct ListedKeys {
  TileLists lists;

  __device__ __forceinline__ int operator()(const ScheduleParams&, int b, const ScheduledTile& tile) const {
    const int row_blocks = (tile.q_len + kListedRows - 1) / kListedRows;
    int sum = 0;
    for (int head = 0; head < lists.heads; ++head) {
      const int2 count =
          lists.counts[static_cast<long long>(b * lists.batch_step + head) * row_blocks + tile.first_row / kListedRows];
      sum += count.x + count.y;
    }
    return max(0, sum / lists.heads);
  }
};

constexpr int kScheduleThreads = 1024;

template <class Sequences, class Work>
struct Scheduler {
  // Tiles are sorted by their number of key tiles: exactly below kExact, then in kExact / 2 classes per power of two.
  static constexpr int kExact = 32, kClasses = 512;

  const ScheduleParams& p;
  const Sequences& sequences;
  const Work& work;
  int (&counts)[kClasses];

  // 0 for the most work.
  __device__ __forceinline__ static int work_class(int work) {
    if (work >= kExact) {
      const int log2 = 31 - __clz(work);
      work = kExact / 2 * (log2 - 4) + (work >> (log2 - 4));
    }
    return kClasses - 1 - work;
  }

  // Calls visit(sequence's number, tile) for each work tile. A warp takes a sequence.
  template <class Visit>
  __device__ __forceinline__ void each_tile(Visit visit) const {
    for (int b = threadIdx.x / 32; b < p.batch; b += kScheduleThreads / 32) {
      ScheduledTile tile = sequences(b);
      for (int row = threadIdx.x % 32 * p.block_m; row < tile.q_len; row += 32 * p.block_m) {
        tile.first_row = row;
        visit(b, tile);
      }
    }
  }

  __device__ __forceinline__ void run() const {
    for (int i = threadIdx.x; i < kClasses; i += kScheduleThreads) counts[i] = 0;
    sequences.start();
    __syncthreads();
    for (int b = threadIdx.x / 32; b < p.batch; b += kScheduleThreads / 32) sequences.write(b, sequences(b));
    each_tile([&](int b, const ScheduledTile& tile) { atomicAdd(&counts[work_class(work(p, b, tile))], 1); });
    __syncthreads();
    const int own = threadIdx.x < kClasses ? counts[threadIdx.x] : 0;
    for (int step = 1; step < kClasses; step *= 2) {
      const int before = threadIdx.x < kClasses && threadIdx.x >= step ? counts[threadIdx.x - step] : 0;
      __syncthreads();
      if (threadIdx.x < kClasses) counts[threadIdx.x] += before;
      __syncthreads();
    }
    const int total = counts[kClasses - 1], end = threadIdx.x < kClasses ? counts[threadIdx.x] : 0;
    __syncthreads();
    if (threadIdx.x < kClasses) counts[threadIdx.x] = end - own;
    if (threadIdx.x == 0) {
      p.tile_count[0] = min(total, p.max_tiles);
      p.tile_count[1] = 0;
    }
    __syncthreads();
    each_tile([&](int b, const ScheduledTile& tile) {
      const int place = atomicAdd(&counts[work_class(work(p, b, tile))], 1);
      if (place < p.max_tiles) p.tiles[place] = tile;
    });
  }
};

// Grid: one block of kScheduleThreads threads.
template <class Sequences, class Work>
__device__ __forceinline__ void make_schedule(const ScheduleParams& p, const Sequences& sequences, const Work& work) {
  __shared__ int counts[Scheduler<Sequences, Work>::kClasses];
  ptx::launch_dependent_grids();
  ptx::griddepcontrol_wait();  // the attention kernel waits for this kernel alone, and reads what the one before wrote
  Scheduler<Sequences, Work>{p, sequences, work, counts}.run();
}

}  // namespace greenfast

// The schedule of packed sequences: the work tiles of the attention kernel by descending work, and for the quantizer
// the sequence of each block of kRowBlock keys. Made on the device, so that the host need not know any length.
//
// The codes of K and V of a sequence begin at a multiple of kRowBlock: sequence b, whose keys begin at row r of K, at
// (r + b * kRowBlock) / kRowBlock * kRowBlock. That leaves room for the last block of each sequence before it, whatever
// the lengths, without a prefix sum (as FlashAttention-3 places its padded gradients).
#pragma once

#include "attention/params.cuh"
#include "common/scale_blocks.cuh"
#include "ptx/griddepcontrol.cuh"

namespace greenfast {

// A sequence's keys: its first row in K, its first row in the codes, and its length.
struct alignas(16) PackedKeys {
  int first_input_row, first_key, kv_len, padding;
};

struct ScheduleParams {
  const int *cu_seqlens_q, *cu_seqlens_k;  // (batch + 1)
  const int* seqused_k;                    // (batch), or null: all keys
  int batch, q_rows, k_rows;               // rows of Q and of K: no sequence reaches beyond them, whatever its numbers
  int block_m, block_n;
  int causal, causal_shift, window, window_shift;  // as of the attention kernel
  PackedTile* tiles;
  int max_tiles;
  int* tile_count;        // two numbers, as in FlashParams
  PackedKeys* sequences;  // (batch)
  int* block_sequence;    // (key_blocks): the sequence of each block of codes, or -1
  int key_blocks;
};

constexpr int kScheduleThreads = 1024;

struct Scheduler {
  // Tiles are sorted by their number of key tiles: exactly below kExact, then in kExact / 2 classes per power of two.
  static constexpr int kExact = 32, kClasses = 512;

  const ScheduleParams& p;
  int (&counts)[kClasses];

  struct Lengths {
    int first_q_row, q_len, first_input_row, first_key, kv_len;
  };

  __device__ __forceinline__ static int clamp(int x, int low, int high) { return max(low, min(x, high)); }

  __device__ __forceinline__ Lengths lengths(int b) const {
    Lengths x;
    x.first_q_row = clamp(p.cu_seqlens_q[b], 0, p.q_rows);
    x.q_len = clamp(p.cu_seqlens_q[b + 1], x.first_q_row, p.q_rows) - x.first_q_row;
    x.first_input_row = clamp(p.cu_seqlens_k[b], 0, p.k_rows);
    x.kv_len = clamp(p.cu_seqlens_k[b + 1], x.first_input_row, p.k_rows) - x.first_input_row;
    if (p.seqused_k != nullptr) x.kv_len = clamp(p.seqused_k[b], 0, x.kv_len);
    x.first_key = (x.first_input_row + b * kRowBlock) / kRowBlock * kRowBlock;
    return x;
  }

  // The key tiles of a work tile.
  __device__ __forceinline__ int work(const Lengths& x, int first_row) const {
    const int stop_row = min(first_row + p.block_m, x.q_len);
    const int shift = x.kv_len - x.q_len;
    const int end = p.causal ? clamp(stop_row + shift + p.causal_shift, 0, x.kv_len) : x.kv_len;
    const int begin = p.window ? clamp(first_row + shift + p.window_shift, 0, end) : 0;
    return (end + p.block_n - 1) / p.block_n - begin / p.block_n;
  }

  // 0 for the most work.
  __device__ __forceinline__ static int work_class(int work) {
    if (work >= kExact) {
      const int log2 = 31 - __clz(work);
      work = kExact / 2 * (log2 - 4) + (work >> (log2 - 4));
    }
    return kClasses - 1 - work;
  }

  // Calls visit(lengths, first_row) for each work tile. A warp takes a sequence.
  template <class Visit>
  __device__ __forceinline__ void each_tile(Visit visit) const {
    for (int b = threadIdx.x / 32; b < p.batch; b += kScheduleThreads / 32) {
      const Lengths x = lengths(b);
      for (int row = threadIdx.x % 32 * p.block_m; row < x.q_len; row += 32 * p.block_m) visit(x, row);
    }
  }

  __device__ __forceinline__ void run() const {
    for (int i = threadIdx.x; i < kClasses; i += kScheduleThreads) counts[i] = 0;
    for (int i = threadIdx.x; i < p.key_blocks; i += kScheduleThreads) p.block_sequence[i] = -1;
    __syncthreads();
    for (int b = threadIdx.x / 32; b < p.batch; b += kScheduleThreads / 32) {
      const Lengths x = lengths(b);
      if (threadIdx.x % 32 == 0) p.sequences[b] = {x.first_input_row, x.first_key, x.kv_len, 0};
      const int first_block = x.first_key / kRowBlock, blocks = (x.kv_len + kRowBlock - 1) / kRowBlock;
      for (int i = threadIdx.x % 32; i < blocks; i += 32) p.block_sequence[first_block + i] = b;
    }
    each_tile([&](const Lengths& x, int row) { atomicAdd(&counts[work_class(work(x, row))], 1); });
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
    each_tile([&](const Lengths& x, int row) {
      const int place = atomicAdd(&counts[work_class(work(x, row))], 1);
      if (place < p.max_tiles) {
        p.tiles[place] = {x.first_q_row, x.q_len, x.first_key, x.kv_len, row, {0, 0, 0}};
      }
    });
  }
};

// Grid: one block of kScheduleThreads threads.
__device__ __forceinline__ void make_schedule(const ScheduleParams& p) {
  __shared__ int counts[Scheduler::kClasses];
  ptx::launch_dependent_grids();
  Scheduler{p, counts}.run();
}

}  // namespace greenfast

// Computes for new tokens their slots in a paged cache and their positions, and the new sequence lengths.
#pragma once

namespace greenfast::serving {

struct SlotParams {
  const int* starts;        // (sequences + 1): first new token of each sequence
  const int* before;        // (sequences): keys in the cache, or null for 0
  const int* counted_from;  // (sequences): position of the first new token, or null for `before`
  const int* block_table;   // (sequences, entries), or null: sequence b then gets pages from starts[b] / page + b on
  int* made_table;          // output: that block table, (sequences, entries), if block_table is null
  long long* slots;         // (tokens): -1 for tokens of no sequence or beyond the block table
  long long* positions;     // (tokens)
  int* lengths;             // (sequences)
  int sequences, tokens, page, entries;
  long long table_row;  // row stride of block_table

  // Binary search for the sequence of a token; the last sequence for tokens of none.
  __device__ __forceinline__ int sequence_of(int token) const {
    int low = 0,
        high = sequences;  // invariant: starts[low] <= token < starts[high + 1]
    while (low < high) {
      const int middle = (low + high) / 2;
      if (starts[middle + 1] <= token) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    return min(low, sequences - 1);
  }
};

// Any grid and block. At least one sequence.
__device__ __forceinline__ void find_slots(const SlotParams& p) {
  const int first = blockIdx.x * blockDim.x + threadIdx.x, step = gridDim.x * blockDim.x;
  for (int token = first; token < p.tokens; token += step) {
    const int b = p.sequence_of(token), offset = token - p.starts[b], before = p.before == nullptr ? 0 : p.before[b];
    long long slot = -1;
    const long long position = static_cast<long long>(before) + offset;
    if (token < p.starts[p.sequences]) {
      if (p.block_table == nullptr) {
        slot = (static_cast<long long>(p.starts[b] / p.page) + b) * p.page + position;
      } else if (position >= 0 && position < static_cast<long long>(p.entries) * p.page) {
        slot = static_cast<long long>(p.block_table[b * p.table_row + position / p.page]) * p.page + position % p.page;
      }
    }
    p.slots[token] = slot;
    p.positions[token] = static_cast<long long>(p.counted_from == nullptr ? before : p.counted_from[b]) + offset;
  }
  for (int b = first; b < p.sequences; b += step) {
    p.lengths[b] = (p.before == nullptr ? 0 : p.before[b]) + p.starts[b + 1] - p.starts[b];
  }
  if (p.block_table == nullptr) {
    const long long entries = static_cast<long long>(p.sequences) * p.entries;
    for (long long i = first; i < entries; i += step) {
      const int b = static_cast<int>(i / p.entries);
      p.made_table[i] = p.starts[b] / p.page + b + static_cast<int>(i % p.entries);
    }
  }
}

}  // namespace greenfast::serving

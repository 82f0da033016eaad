// The arguments that the attention kernels of all GPUs share. Q, K and V are separate: tensor maps or pointers.
#pragma once

namespace greenfast {

// The layout of O. Strides are in elements, multiples of 8; columns are contiguous.
struct OutputRows {
  long long gap;  // extra stride between batches: batch stride - heads * head
  long long head, row;
  unsigned heads;  // of a batch; unsigned, because signed division would cause spills
  int columns;     // the caller's head_dim: a multiple of 8, at most kHeadDim

  // The offset of row 0 of a head. head_index: counted over all batches.
  __device__ __forceinline__ long long first(unsigned head_index) const {
    return head_index * head + (gap == 0 ? 0 : head_index / heads * gap);
  }
};

// A work tile of a schedule, for all heads of its sequence (schedule.cuh).
struct alignas(16) ScheduledTile {
  int first_q_row, q_len;  // the sequence: its first row in the heads' planes of Q, and its rows
  int first_key, kv_len;   // its first row in the planes of K's codes, a multiple of kRowBlock, and its keys
  int first_row;           // of the tile, in the sequence
  int first_head;          // the sequence's first head, counted over the batch
  int shift;               // the key at the place of row 0, to which masks are aligned
  int padding;
};

// The key tiles that each block of kListedRows rows attends to (schedule.cuh, BlockMask in Python).
struct TileLists {
  const int2* counts;   // (batch or 1, heads or 1, row blocks): tiles with a mask, then tiles without one
  const int2* entries;  // (batch or 1, heads or 1, row blocks, key tiles): a tile's number and its index in bits
  const unsigned*
      bits;   // (masks, kListedRows, 4): bit 2 j + e of row and quad: the row attends to key 8 j + 2 quad + e
  int masks;  // in bits
  int heads, batch_step;  // the lists' heads, and their step from a sequence to the next: heads, or 0 with one batch
};
constexpr int kListedRows = 128;

// Scales multiply the quantized values. A block scale is NaN if the block holds a non-finite number.
struct FlashParams {
  const float* q_scale;  // (batch x heads), or (batch x heads, blocks of kQueryBlock rows) with kQueryBlockScales
  const float* k_scale;  // (batch x kv_heads), or (batch x kv_heads, blocks of kRowBlock keys) with kKeyBlockScales
                         // with kFineScales (batch x heads, q_len) and (batch x kv_heads, blocks, kKeyGroups)
  const float* v_scale;  // the same with kValueBlockScales, or (batch x kv_heads, head_dim) with kChannelScales
  void* out;             // (batch, heads, q_len, columns) of Cfg::Out, as `rows` says
  float* lse;            // (batch x heads, q_len), natural logarithm; unused without kLse. With kScoreMax pairs: of the
                         // log-sum-exp and the largest score
  int heads;             // batch x heads; with kScheduled, the heads of one sequence
  int heads_per_kv;      // query heads per KV head
  int q_len;             // rows of Q in each head
  int kv_len;            // rows of K and V in each head: keys
  int causal_shift;      // with a mask, row i attends to keys 0 .. i + causal_shift
  int head_swizzle;      // heads that are scheduled together, so that their K and V stay in L2
  float softmax_scale;   // of the scores, > 0; usually 1 / sqrt(head_dim)
  OutputRows rows;
  // With kScheduled q_len and kv_len are the rows of a head's plane in Q and in the codes, and a tile's shift is added
  // to the shifts.
  const ScheduledTile* tiles;  // by descending work
  int* tile_count;     // their number, and the number of tiles that blocks have taken in addition to their first
  int window_shift;    // with kWindow, row i attends to no key before i + window_shift
  const float* sinks;  // (rows.heads), with kSinks: the logit of a key without a value, with a share of each row
  TileLists lists;     // with kListed
  float skip_log2;     // with kSkip: the threshold of a tile's weights, < 0, as a power of two
};

}  // namespace greenfast

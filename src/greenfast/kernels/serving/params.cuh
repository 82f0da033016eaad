// The arguments that the host passes to the serving kernels, and the key range of a query token.
#pragma once

namespace greenfast::serving {

// Keys are processed in tiles of kBlockN, and tiles in chunks, at fixed positions of their sequence. Each chunk has its
// own softmax, and chunks are merged in order. So the bits of a row do not depend on the division of the work.
constexpr int kBlockN = 128;
constexpr int kChunk = 512;

// The sequences of a batch: lengths and token offsets, in device memory.
struct Batch {
  const int* q_begins;   // (batch + 1): first token of each sequence in the packed Q
  const int* kv_lens;    // (batch): keys in the cache
  int sequences, group;  // group: query heads per KV head
  // Token i of a sequence has position p = i + kv_len - q_len, and attends to keys p - left .. p + right.
  int left, right;         // 2^30 or more: no limit on that side
  unsigned group_inverse;  // 2^32 / group, rounded up; valid for rows below 2^32 / group; unused if group is 1

  // The query token of a packed row.
  __device__ __forceinline__ int token(int row) const {
    return group == 1 ? row : static_cast<int>(__umulhi(static_cast<unsigned>(row), group_inverse));
  }

  __device__ __forceinline__ int key_begin(int token, int q_len, int kv_len) const {
    return max(0, token + kv_len - q_len - left);
  }
  __device__ __forceinline__ int key_end(int token, int q_len, int kv_len) const {
    return min(kv_len, token + kv_len - q_len + 1 + right);
  }
};

struct AttentionParams {
  const void* q;         // (tokens, heads, head_dim)
  const float* q_scale;  // per sequence and KV head, if Q is E4M3; else unused
  const void* v;         // V cache
  const float* k_scale;  // per sequence and KV head, or per token: (pages, kv_heads, page)
  const float* v_scale;
  const float* sinks;      // (heads), natural logarithms, or null
  const int* block_table;  // (batch, table_entries): page indices
  int* plan;
  float* partials;
  void* out;   // (tokens, heads, head_dim)
  float* lse;  // (heads, tokens), or null
  Batch batch;
  int kv_heads, tokens, pages, page, table_entries,
      table_row;  // page: tokens of a page; table_row: row stride of block_table
  int q_scale_strides[2], k_scale_strides[2], v_scale_strides[2];  // of sequences (or pages) and heads
  int slot_rows, slots;                       // rows of a partial result, and partial results per block minus 1
  int max_tiles;                              // capacity of the plan
  int parallel_heads;                         // see Plan
  long long q_token, q_head, v_page, v_head;  // strides, in elements
  float softmax_scale, softcap;
};

}  // namespace greenfast::serving

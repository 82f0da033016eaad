// What the host passes to the kernels of serving, and which keys a query token attends to.
#pragma once

namespace greenfast::serving {

// Keys are taken in tiles, and tiles in chunks, that lie at fixed positions of their sequence. A chunk's softmax begins
// from nothing and chunks are merged in order, so the bits of a row do not depend on how its work was divided.
constexpr int kTile = 128;
constexpr int kChunk = 512;

// Sequences in a batch: lengths and where their tokens lie, all in device memory.
struct Batch {
  const int* q_begins;   // (batch + 1): the first token of each sequence in the packed Q
  const int* kv_lens;    // (batch): keys in the cache
  int sequences, group;  // group: query heads that share a head of K and V
  // Token i of a sequence has position p = i + kv_len - q_len, and attends to keys p - left .. p + right.
  int left, right;  // at least 2^30 where that side is open
  unsigned group_inverse;  // 2^32 / group, rounded up, for rows below 2^32 / group; of no use for 1

  // The token of a packed row.
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
  const float* q_scale;  // by sequence and head of K and V of an E4M3 Q, else unused
  const void* v;         // pages of V
  const float* k_scale;  // by sequence and head of K and V; or by token, (pages, kv_heads, page)
  const float* v_scale;
  const float* sinks;      // (heads), natural logarithms, or null
  const int* block_table;  // (batch, table_entries): pages
  int* plan;
  float* partials;
  void* out;   // (tokens, heads, head_dim)
  float* lse;  // (heads, tokens), or null
  Batch batch;
  int kv_heads, tokens, pages, page, table_entries, table_row;  // page: its tokens; table_row: a stride
  int q_scale_strides[2], k_scale_strides[2], v_scale_strides[2];  // of sequences, or pages, and heads
  int slot_rows, slots;            // rows of a partial result, and how many a block may leave, less one
  int most_tiles;                  // row tiles that the plan has room for
  int abreast;                     // neighbouring blocks that have the same run, of different heads of K and V
  long long q_token, q_head, v_page, v_head;  // strides, in elements
  float softmax_scale, softcap;
};

}  // namespace greenfast::serving

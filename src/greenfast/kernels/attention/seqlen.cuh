// Axis: the sequence. Lengths and row offsets of a head.
//
// Sequence: every head has q_len rows of Q and kv_len keys. ScheduledSequence: a schedule says where the rows and keys of
// a sequence are. Packed sequences follow one another in the planes of Q and of the codes; else a head has its own.
#pragma once

#include "attention/params.cuh"
#include "common/scale_blocks.cuh"

namespace greenfast {

// The keys of a head: its plane in the tensor maps of K and V (batch x kv_heads), and the row of a key in it.
struct KeyRows {
  int kv_head;
  __device__ __forceinline__ int row(int key) const { return key; }
};

struct Sequence {
  static constexpr int shift = 0;  // the key at the place of row 0, to which the shifts of the masks are added
  const FlashParams& p;
  int head;  // counted over the batch: 0 .. batch x heads - 1

  __device__ __forceinline__ KeyRows key_rows() const { return {head / p.heads_per_kv}; }
  __device__ __forceinline__ int q_len() const { return p.q_len; }
  __device__ __forceinline__ int kv_len() const { return p.kv_len; }

  // The row in the head's plane of Q's tensor map (batch x heads).
  __device__ __forceinline__ int q_row(int row) const { return row; }

  // Block scales of a head: their number, and the index of the first.
  __device__ __forceinline__ int kv_blocks() const { return (kv_len() + kRowBlock - 1) / kRowBlock; }
  __device__ __forceinline__ int q_blocks() const { return (q_len() + kQueryBlock - 1) / kQueryBlock; }
  __device__ __forceinline__ size_t first_kv_block(const KeyRows& keys) const {
    return static_cast<size_t>(keys.kv_head) * kv_blocks();
  }
  __device__ __forceinline__ size_t first_q_block() const { return static_cast<size_t>(head) * q_blocks(); }
};

struct ScheduledKeyRows {
  int kv_head;
  int first_key;
  __device__ __forceinline__ int row(int key) const { return first_key + key; }
};

struct ScheduledSequence {
  // A head of a work tile's sequence, counted in the sequence.
  struct Head {
    int head;
    ScheduledTile tile;
  };

  const FlashParams& p;
  int head;
  int first_q_row, rows, first_key, keys, shift;

  __device__ __forceinline__ ScheduledSequence(const FlashParams& p, const Head& of)
      : p(p),
        head(of.tile.first_head + of.head),
        first_q_row(of.tile.first_q_row),
        rows(of.tile.q_len),
        first_key(of.tile.first_key),
        keys(of.tile.kv_len),
        shift(of.tile.shift) {}

  __device__ __forceinline__ ScheduledKeyRows key_rows() const { return {head / p.heads_per_kv, first_key}; }
  __device__ __forceinline__ int q_len() const { return rows; }
  __device__ __forceinline__ int kv_len() const { return keys; }
  __device__ __forceinline__ int q_row(int row) const { return first_q_row + row; }
  __device__ __forceinline__ int kv_blocks() const { return (keys + kRowBlock - 1) / kRowBlock; }
  __device__ __forceinline__ size_t first_kv_block(const ScheduledKeyRows& key_rows) const {
    return static_cast<size_t>(key_rows.kv_head) * ((p.kv_len + kRowBlock - 1) / kRowBlock) + first_key / kRowBlock;
  }
  // As in Sequence; for sequences that are not packed.
  __device__ __forceinline__ int q_blocks() const { return (rows + kQueryBlock - 1) / kQueryBlock; }
  __device__ __forceinline__ size_t first_q_block() const { return static_cast<size_t>(head) * q_blocks(); }
};

}  // namespace greenfast

// Axis: the sequence. Lengths and row offsets of a head.
//
// Here every head has q_len rows of Q and kv_len keys. Packed sequences of several lengths (varlen) need another
// Sequence that reads cumulative lengths, and changes in three places that read q_len from FlashParams: the number of
// work tiles (scheduler.cuh), consume() (sm90/kernel.cuh) and the epilogue.
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

}  // namespace greenfast

// Axis: the sequence. Where the rows of a head lie, and how many they are.
//
// Every head has q_len rows of Q and kv_len of K and V here. Batches of sequences of several lengths, packed one behind
// the other, need another Sequence, whose lengths and first rows come from cumulative lengths, and three places that
// read q_len from FlashParams: the count of work tiles (scheduler.cuh), consume() (sm90/kernel.cuh) and the epilogue.
#pragma once

#include "attention/params.cuh"
#include "common/scale_blocks.cuh"

namespace greenfast {

// Where the keys of a head lie: a plane of the tensor maps of K and V, of batch x kv_heads, and a row of it.
struct KeyRows {
  int kv_head;
  __device__ __forceinline__ int row(int key) const { return key; }
};

struct Sequence {
  const FlashParams& p;
  int head;  // counted over the batch: of batch x heads

  __device__ __forceinline__ KeyRows key_rows() const { return {head / p.heads_per_kv}; }
  __device__ __forceinline__ int q_len() const { return p.q_len; }
  __device__ __forceinline__ int kv_len() const { return p.kv_len; }

  // Where a row of the head lies in its plane of Q's tensor map, of batch x heads.
  __device__ __forceinline__ int q_row(int row) const { return row; }

  // Scales of blocks, which begin anew with each head: how many it has, and its first.
  __device__ __forceinline__ int kv_blocks() const { return (kv_len() + kRowBlock - 1) / kRowBlock; }
  __device__ __forceinline__ int q_blocks() const { return (q_len() + kQueryBlock - 1) / kQueryBlock; }
  __device__ __forceinline__ size_t first_kv_block(const KeyRows& keys) const {
    return static_cast<size_t>(keys.kv_head) * kv_blocks();
  }
  __device__ __forceinline__ size_t first_q_block() const { return static_cast<size_t>(head) * q_blocks(); }
};

}  // namespace greenfast

// Quantizes Q, K and V in one launch, to the layouts that the fast attention kernels read.
//
// K and V have a scale per 128 rows, Q per 16 rows (rows.cuh, values.cuh). Inputs are read once. Layouts: Q and K
// (heads, length, kHeadDim), V (heads, kHeadDim, length rounded up to 16). Columns from kColumns on are zeros before
// the rotation. If K is a shard of the keys, kSampled takes the mean from samples of all keys.
#pragma once

#include "ptx/griddepcontrol.cuh"
#include "quantize/rows.cuh"
#include "quantize/values.cuh"

namespace greenfast {

struct QuantizeParams {
  QuantizeInput q, k, v;
  unsigned char *q_codes, *k_codes, *v_codes;
  float* q_scale;  // (batch x heads, blocks of 16 rows), or with kFineScales (batch x heads, q_len)
  float* k_scale;  // (batch x kv_heads, blocks of 128 rows), or (batch x kv_heads, blocks, kKeyGroups)
  float* v_scale;  // (batch x kv_heads, blocks of 128 rows)
  float* k_mean;   // (batch x kv_heads, kHeadDim), rotated if K is; unused without kKeyMean
  int batch, heads, kv_heads, q_len, kv_len;
  QuantizeInput samples;  // with kSampled: kMeanKeys keys of each head, to take the mean of
  // Of the keys of a sequence only the first are read with kLengths, and only those listed with kGathered. Codes have
  // their order, and codes and scales after them are not written.
  const int* kv_lengths;   // (batch)
  const int* kv_rows;      // (batch, kv_len)
  PrologueInput prologue;  // with kPrologue: norm and RoPE of Q and K
};

template <class Cfg>
__device__ __forceinline__ RowsPrologue<Cfg> prologue_of(const QuantizeParams& p, bool of_q, int head_index) {
  if constexpr (Cfg::kPrologue) {
    const PrologueInput& input = p.prologue;
    const int heads = of_q ? p.heads : p.kv_heads, batch = head_index / heads, head = head_index % heads;
    if (of_q) return {input, input.q_weight, input.q_inverse, batch, head, p.q_len};
    return {input, input.k_weight, input.k_inverse, batch, head, p.kv_len};
  } else {
    return {};
  }
}

// The keys of a head that are quantized.
template <class Cfg>
__device__ __forceinline__ HeadRows<Cfg> select_keys(const QuantizeParams& p, const QuantizeInput& input,
                                                     int head_index) {
  const int b = head_index / p.kv_heads;
  const int length = Cfg::kLengths ? max(0, min(p.kv_lengths[b], p.kv_len)) : p.kv_len;
  HeadRows<Cfg> head(input, b, head_index % p.kv_heads, length);
  if constexpr (Cfg::kGathered) head.places = p.kv_rows + static_cast<long long>(b) * p.kv_len;
  return head;
}

__device__ __forceinline__ int count_tiles(int length) { return (length + kRowBlock - 1) / kRowBlock; }

// Grid: a block per kKeyTiles tiles of K, then one per tile of V, then one per tile of Q of
// kQueryHeads heads. Block: Cfg::kThreads.
template <class Cfg>
__device__ __forceinline__ void quantize_qkv(const QuantizeParams& p) {
  __shared__ union Storage {
    RowsStorage<Cfg> rows;
    VStorage<Cfg> values;
  } shared;
  ptx::launch_dependent_grids();
  const int kv_tiles = (p.kv_len + kRowBlock - 1) / kRowBlock, q_tiles = (p.q_len + kRowBlock - 1) / kRowBlock;
  const int k_blocks = (kv_tiles + Cfg::kKeyTiles - 1) / Cfg::kKeyTiles;  // per head
  int item = blockIdx.x;
  if (item < p.batch * p.kv_heads * k_blocks) {
    const int head_index = item / k_blocks, tile = item % k_blocks * Cfg::kKeyTiles;
    const RowsQuantizer<Cfg> rows(shared.rows, select_keys<Cfg>(p, p.k, head_index),
                                  prologue_of<Cfg>(p, false, head_index));
    const int stop = min(tile + Cfg::kKeyTiles, Cfg::kLengths ? count_tiles(rows.head.length) : kv_tiles);
    if (Cfg::kLengths && tile >= stop) return;
    const HeadRows<Cfg> samples(p.samples, head_index / p.kv_heads, head_index % p.kv_heads, kMeanKeys);
    rows.quantize_k(Cfg::kSampled ? samples : rows.head, tile, stop,
                    p.k_codes + static_cast<long long>(head_index) * p.kv_len * Cfg::kHeadDim,
                    p.k_scale + static_cast<long long>(head_index) * kv_tiles * (Cfg::kFineScales ? kKeyGroups : 1),
                    p.k_mean + head_index * Cfg::kHeadDim);
    return;
  }
  item -= p.batch * p.kv_heads * k_blocks;
  if (item < p.batch * p.kv_heads * kv_tiles) {
    const int head_index = item / kv_tiles, padded = (p.kv_len + 15) / 16 * 16;
    const HeadRows<Cfg> head = select_keys<Cfg>(p, p.v, head_index);
    if (Cfg::kLengths && item % kv_tiles >= count_tiles(head.length)) return;
    VQuantizer<Cfg>::run(shared.values, head, item % kv_tiles,
                         p.v_codes + static_cast<long long>(head_index) * Cfg::kHeadDim * padded, padded,
                         p.v_scale + head_index * kv_tiles);
    return;
  }
  item -= p.batch * p.kv_heads * kv_tiles;
  int head_index = item / q_tiles * Cfg::kQueryHeads;
  const int q_blocks = (p.q_len + kQueryBlock - 1) / kQueryBlock;
  do {
    const RowsQuantizer<Cfg> rows(shared.rows, HeadRows<Cfg>(p.q, head_index / p.heads, head_index % p.heads, p.q_len),
                                  prologue_of<Cfg>(p, true, head_index));
    rows.quantize_q(item % q_tiles, p.q_codes + static_cast<long long>(head_index) * p.q_len * Cfg::kHeadDim,
                    p.q_scale + static_cast<long long>(head_index) * (Cfg::kFineScales ? p.q_len : q_blocks));
    if (Cfg::kQueryHeads > 1) __syncthreads();  // all threads have read shared memory
  } while (Cfg::kQueryHeads > 1 && ++head_index % Cfg::kQueryHeads != 0);
}

}  // namespace greenfast

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

// The second part of a sequence in two parts, such as image tokens after text tokens.
struct SecondPart {
  QuantizeInput q, k, v;
  int q_boundary, kv_boundary;  // rows of the first part
};

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
  SecondPart second;       // with kParts
};

template <class Cfg>
__device__ __forceinline__ RowsPrologue<Cfg> prologue_of(const QuantizeParams& p, bool of_q, int head_index) {
  if constexpr (Cfg::kPrologue) {
    const PrologueInput& input = p.prologue;
    const int heads = of_q ? p.heads : p.kv_heads, batch = head_index / heads, head = head_index % heads;
    if (of_q)
      return {input, input.q_weight, input.q_bias, input.second_q_weight, input.q_moments, batch, head, p.q_len};
    return {input, input.k_weight, input.k_bias, input.second_k_weight, input.k_moments, batch, head, p.kv_len};
  } else {
    return {};
  }
}

// The keys of a head that are quantized, or its values. second: the input of the second part.
template <class Cfg>
__device__ __forceinline__ HeadRows<Cfg> select_keys(const QuantizeParams& p, const QuantizeInput& input,
                                                     const QuantizeInput& second, int head_index) {
  const int b = head_index / p.kv_heads;
  const int length = Cfg::kLengths ? max(0, min(p.kv_lengths[b], p.kv_len)) : p.kv_len;
  HeadRows<Cfg> head(input, b, head_index % p.kv_heads, length);
  if constexpr (Cfg::kGathered) head.places = p.kv_rows + static_cast<long long>(b) * p.kv_len;
  if constexpr (Cfg::kParts) head.set_second(second, b, head_index % p.kv_heads, p.second.kv_boundary);
  return head;
}

template <class Cfg>
__device__ __forceinline__ HeadRows<Cfg> select_queries(const QuantizeParams& p, int head_index) {
  HeadRows<Cfg> head(p.q, head_index / p.heads, head_index % p.heads, p.q_len);
  if constexpr (Cfg::kParts) {
    head.set_second(p.second.q, head_index / p.heads, head_index % p.heads, p.second.q_boundary);
  }
  return head;
}

__device__ __forceinline__ int count_tiles(int length) { return (length + kRowBlock - 1) / kRowBlock; }

template <class Cfg>
__device__ __forceinline__ RowsQuantizer<Cfg> quantizer_of_keys(const QuantizeParams& p, RowsStorage<Cfg>& shared,
                                                                int head_index) {
  return {shared, select_keys<Cfg>(p, p.k, p.second.k, head_index), prologue_of<Cfg>(p, false, head_index)};
}

template <class Cfg>
__device__ __forceinline__ RowsQuantizer<Cfg> quantizer_of_queries(const QuantizeParams& p, RowsStorage<Cfg>& shared,
                                                                   int head_index) {
  return {shared, select_queries<Cfg>(p, head_index), prologue_of<Cfg>(p, true, head_index)};
}

// Computes the means of kKeyHeads heads of K, of several at once, each by the warps of two groups of rows.
template <class Cfg>
__device__ __forceinline__ void compute_means(const QuantizeParams& p, RowsStorage<Cfg>& shared, int head_index,
                                              bool store) {
  constexpr int kGroups = kMeanKeys / kQueryBlock, kAtOnce = kRowBlock / kMeanKeys;
  // The tile's angles come here later.
  auto* const group_mean =
      reinterpret_cast<GroupMeans<Cfg>*>(RowsPrologue<Cfg>::storage() + RowsPrologue<Cfg>::kAnglesAt);
  const int group = quantizer_of_keys<Cfg>(p, shared, head_index).group;
#pragma unroll 1
  for (int first = 0; first < Cfg::kKeyHeads; first += kAtOnce) {
    const int number = first + group / kGroups;
    if (number < Cfg::kKeyHeads) {
      const RowsQuantizer<Cfg> rows = quantizer_of_keys<Cfg>(p, shared, head_index + number);
      rows.compute_group_means(rows.head, group % kGroups, group_mean[number]);
    }
  }
  __syncthreads();
#pragma unroll 1
  for (int i = threadIdx.x; i < Cfg::kKeyHeads * Cfg::kHeadDim; i += Cfg::kThreads) {
    const int n = i / Cfg::kHeadDim, head = head_index + n;
    quantizer_of_keys<Cfg>(p, shared, head)
        .compute_median(group_mean[n], n, i % Cfg::kHeadDim, store ? p.k_mean + head * Cfg::kHeadDim : nullptr);
  }
  __syncthreads();
}

template <class Cfg, class StartNext>
__device__ __forceinline__ void quantize_tile_of_queries(const QuantizeParams& p, RowsStorage<Cfg>& shared, int head,
                                                         int tile, StartNext start_next) {
  const int scales = Cfg::kFineScales ? p.q_len : (p.q_len + kQueryBlock - 1) / kQueryBlock;  // of a head
  quantizer_of_queries<Cfg>(p, shared, head)
      .quantize_q(tile, p.q_codes + static_cast<long long>(head) * p.q_len * Cfg::kHeadDim,
                  p.q_scale + static_cast<long long>(head) * scales, start_next, Cfg::kHeadTables);
}

// Quantizes tiles `tile` .. `stop` - 1 of kKeyHeads heads of K; with kHeadTables of one head of K and of Q.
template <class Cfg>
__device__ __forceinline__ void quantize_keys(const QuantizeParams& p, RowsStorage<Cfg>& shared, int head_index,
                                              int tile, int stop) {
  quantizer_of_keys<Cfg>(p, shared, head_index).start_load(tile);
  if constexpr (Cfg::kKeyMean) compute_means<Cfg>(p, shared, head_index, tile == 0);
  for (; tile < stop; ++tile) {
    quantizer_of_keys<Cfg>(p, shared, head_index)
        .prologue.read_tile_angles(tile * kRowBlock, p.kv_len, p.second.kv_boundary);
    __syncthreads();
#pragma unroll 1
    for (int number = 0; number < Cfg::kKeyHeads; ++number) {
      const int head = head_index + number;
      const long long codes = static_cast<long long>(head) * p.kv_len * Cfg::kHeadDim;
      const long long scales =
          static_cast<long long>(head) * count_tiles(p.kv_len) * (Cfg::kFineScales ? kKeyGroups : 1);
      quantizer_of_keys<Cfg>(p, shared, head).quantize_k_tile(tile, p.k_codes + codes, p.k_scale + scales, number, [&] {
        if constexpr (Cfg::kHeadTables) {
          quantizer_of_queries<Cfg>(p, shared, head).start_load(tile);
          return;
        }
        const bool last = number + 1 == Cfg::kKeyHeads;
        if (last && tile + 1 == stop) return;
        quantizer_of_keys<Cfg>(p, shared, last ? head_index : head + 1).start_load(last ? tile + 1 : tile);
      });
    }
    if constexpr (Cfg::kHeadTables) {
      quantize_tile_of_queries<Cfg>(p, shared, head_index, tile, [&] {
        if (tile + 1 < stop) quantizer_of_keys<Cfg>(p, shared, head_index).start_load(tile + 1);
      });
    }
    __syncthreads();  // all threads have read the angles and the largest values
  }
}

// Quantizes a tile of kQueryHeads heads of Q.
template <class Cfg>
__device__ __forceinline__ void quantize_queries(const QuantizeParams& p, RowsStorage<Cfg>& shared, int head_index,
                                                 int tile) {
  quantizer_of_queries<Cfg>(p, shared, head_index).start_load(tile);
  quantizer_of_queries<Cfg>(p, shared, head_index)
      .prologue.read_tile_angles(tile * kRowBlock, p.q_len, p.second.q_boundary);
  __syncthreads();
#pragma unroll 1
  for (int number = 0; number < Cfg::kQueryHeads; ++number) {
    const int head = head_index + number;
    quantize_tile_of_queries<Cfg>(p, shared, head, tile, [&] {
      if (number + 1 < Cfg::kQueryHeads) quantizer_of_queries<Cfg>(p, shared, head + 1).start_load(tile);
    });
  }
}

// With kSeveralHeads. Grid: a block per kKeyTiles tiles of K of kKeyHeads heads, then one per tile of Q of kQueryHeads
// heads, then one per tile of V: these are the shortest, and keep all multiprocessors busy at the end. With kHeadTables
// the blocks of K take the tiles of Q too, so that a head's angles are read once.
template <class Cfg>
__device__ __forceinline__ void quantize_several_heads(const QuantizeParams& p, RowsStorage<Cfg>& shared) {
  const int kv_tiles = count_tiles(p.kv_len), q_tiles = count_tiles(p.q_len);
  const int runs = (kv_tiles + Cfg::kKeyTiles - 1) / Cfg::kKeyTiles;
  const int key_blocks = p.batch * p.kv_heads / Cfg::kKeyHeads * runs;
  const int query_blocks = Cfg::kHeadTables ? 0 : p.batch * p.heads / Cfg::kQueryHeads * q_tiles;
  int item = blockIdx.x;
  if (item < key_blocks) {
    const int tile = item % runs * Cfg::kKeyTiles;
    quantize_keys<Cfg>(p, shared, item / runs * Cfg::kKeyHeads, tile, min(tile + Cfg::kKeyTiles, kv_tiles));
    return;
  }
  item -= key_blocks;
  if (item < query_blocks) {
    quantize_queries<Cfg>(p, shared, item / q_tiles * Cfg::kQueryHeads, item % q_tiles);
    return;
  }
  item -= query_blocks;
  const int head_index = item / kv_tiles, padded = (p.kv_len + 15) / 16 * 16;
  VQuantizer<Cfg>::run(*reinterpret_cast<VStorage<Cfg>*>(RowsPrologue<Cfg>::storage()),
                       select_keys<Cfg>(p, p.v, p.second.v, head_index), item % kv_tiles,
                       p.v_codes + static_cast<long long>(head_index) * Cfg::kHeadDim * padded, padded,
                       p.v_scale + head_index * kv_tiles);
}

// Without kSeveralHeads. Grid: a block per kKeyTiles tiles of K, then one per tile of V, then one per tile of Q.
template <class Cfg>
__device__ __forceinline__ void quantize_single_heads(const QuantizeParams& p) {
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
    const RowsQuantizer<Cfg> rows(shared.rows, select_keys<Cfg>(p, p.k, p.second.k, head_index),
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
    const HeadRows<Cfg> head = select_keys<Cfg>(p, p.v, p.second.v, head_index);
    if (Cfg::kLengths && item % kv_tiles >= count_tiles(head.length)) return;
    VQuantizer<Cfg>::run(shared.values, head, item % kv_tiles,
                         p.v_codes + static_cast<long long>(head_index) * Cfg::kHeadDim * padded, padded,
                         p.v_scale + head_index * kv_tiles);
    return;
  }
  item -= p.batch * p.kv_heads * kv_tiles;
  const int head_index = item / q_tiles;
  const int q_blocks = (p.q_len + kQueryBlock - 1) / kQueryBlock;
  const RowsQuantizer<Cfg> rows(shared.rows, select_queries<Cfg>(p, head_index), prologue_of<Cfg>(p, true, head_index));
  rows.quantize_q(item % q_tiles, p.q_codes + static_cast<long long>(head_index) * p.q_len * Cfg::kHeadDim,
                  p.q_scale + static_cast<long long>(head_index) * (Cfg::kFineScales ? p.q_len : q_blocks));
}

// Block: Cfg::kThreads.
template <class Cfg>
__device__ __forceinline__ void quantize_qkv(const QuantizeParams& p) {
  if constexpr (Cfg::kSeveralHeads) {
    __shared__ RowsStorage<Cfg> shared;
    ptx::launch_dependent_grids();
    quantize_several_heads<Cfg>(p, shared);
  } else {
    quantize_single_heads<Cfg>(p);
  }
}

}  // namespace greenfast

// Q, K and V to 8-bit codes and their scales in one launch, in the layouts that the fast attention kernels read.
//
// Each 128 rows of K and V have a scale, and each 16 of Q (quantize_rows.cuh, quantize_values.cuh): nothing is read
// twice. Codes of Q and K: (heads, length, kHeadDim); of V: (heads, kHeadDim, length rounded up to 16). Columns from
// kColumns on are zeros before the rotation. Where K is a part of the keys, kSampled takes the mean of all of them.
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
  float* k_mean;   // (batch x kv_heads, kHeadDim), rotated where K is; unused without kKeyMean
  int batch, heads, kv_heads, q_len, kv_len;
  QuantizeInput samples;  // with kSampled: kMeanKeys keys of each head, of which the mean is taken
};

// Grid: a block for each run of kKeyTiles tiles of K, and for each tile of V and of Q, in this order. Block:
// Cfg::kThreads.
template <class Cfg>
__device__ __forceinline__ void quantize_qkv(const QuantizeParams& p) {
  __shared__ union Storage {
    RowsStorage<Cfg> rows;
    ValuesStorage<Cfg> values;
  } shared;
  ptx::launch_dependent_grids();
  const int kv_tiles = (p.kv_len + kRowBlock - 1) / kRowBlock, q_tiles = (p.q_len + kRowBlock - 1) / kRowBlock;
  const int key_runs = (kv_tiles + Cfg::kKeyTiles - 1) / Cfg::kKeyTiles;  // of a head
  int item = blockIdx.x;
  if (item < p.batch * p.kv_heads * key_runs) {
    const int line = item / key_runs, tile = item % key_runs * Cfg::kKeyTiles;
    const RowsQuantizer<Cfg> rows(shared.rows, HeadRows<Cfg>(p.k, line / p.kv_heads, line % p.kv_heads, p.kv_len));
    const HeadRows<Cfg> samples(p.samples, line / p.kv_heads, line % p.kv_heads, kMeanKeys);
    rows.keys(Cfg::kSampled ? samples : rows.head, tile, min(tile + Cfg::kKeyTiles, kv_tiles),
              p.k_codes + static_cast<long long>(line) * p.kv_len * Cfg::kHeadDim,
              p.k_scale + static_cast<long long>(line) * kv_tiles * (Cfg::kFineScales ? kKeyGroups : 1),
              p.k_mean + line * Cfg::kHeadDim);
    return;
  }
  item -= p.batch * p.kv_heads * key_runs;
  if (item < p.batch * p.kv_heads * kv_tiles) {
    const int line = item / kv_tiles, padded = (p.kv_len + 15) / 16 * 16;
    const HeadRows<Cfg> head(p.v, line / p.kv_heads, line % p.kv_heads, p.kv_len);
    ValuesQuantizer<Cfg>::run(shared.values, head, item % kv_tiles,
                              p.v_codes + static_cast<long long>(line) * Cfg::kHeadDim * padded,
                              p.v_scale + line * kv_tiles);
    return;
  }
  item -= p.batch * p.kv_heads * kv_tiles;
  const int line = item / q_tiles, q_blocks = (p.q_len + kQueryBlock - 1) / kQueryBlock;
  const RowsQuantizer<Cfg> rows(shared.rows, HeadRows<Cfg>(p.q, line / p.heads, line % p.heads, p.q_len));
  rows.queries(item % q_tiles, p.q_codes + static_cast<long long>(line) * p.q_len * Cfg::kHeadDim,
               p.q_scale + static_cast<long long>(line) * (Cfg::kFineScales ? p.q_len : q_blocks));
}

}  // namespace greenfast

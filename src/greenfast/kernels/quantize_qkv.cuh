// Q, K and V to 8-bit codes and their scales in one launch, in the layouts that the fast attention kernels read.
//
// Q and K have a scale for each 128 rows, V for each head or channel (quantize_rows.cuh, quantize_values.cuh). Codes of Q
// and K: (heads, length, kHeadDim); of V: (heads, kHeadDim, length rounded up to 16). Columns from kColumns on are zeros
// before the rotation.
#pragma once

#include "quantize_rows.cuh"
#include "quantize_values.cuh"

namespace greenfast {

struct QuantizeParams {
  QuantizeInput q, k, v;
  unsigned char *q_codes, *k_codes, *v_codes;
  float* q_scale;  // (batch x heads, blocks of 128 rows)
  float* k_scale;  // (batch x kv_heads, blocks of 128 rows)
  float* v_scale;  // (batch x kv_heads), or (batch x kv_heads, kHeadDim) with kChannels
  float* k_mean;   // (batch x kv_heads, kHeadDim), rotated where K is; unused without kKeyMean
  int batch, heads, kv_heads, q_len, kv_len;
};

// Grid: clusters of kCluster blocks, in turns one for a head of V and one for tiles of K, in runs of kKeyTiles, and of Q,
// as long as there are both. V, which takes longest, begins early so, but leaves half of the GPU to tiles: these read and
// write while it waits. Block: Cfg::kThreads.
template <class Cfg>
__device__ __forceinline__ void quantize_qkv(const QuantizeParams& p) {
  __shared__ union Storage {
    RowsStorage<Cfg> rows;
    ValuesStorage<Cfg> values;
  } shared;
  const int cluster = blockIdx.x / Cfg::kCluster, rank = blockIdx.x % Cfg::kCluster, kv_heads = p.batch * p.kv_heads;
  if (cluster < 2 * kv_heads && cluster % 2 == 0) {
    const int line = cluster / 2, padded = (p.kv_len + 15) / 16 * 16;
    const HeadRows<Cfg> head(p.v, line / p.kv_heads, line % p.kv_heads, p.kv_len);
    const ValuesQuantizer<Cfg> values(shared.values, head, rank);
    typename ValuesQuantizer<Cfg>::Columns scale;
    values.choose_scales(p.v_scale + line * (Cfg::kChannels ? Cfg::kHeadDim : 1), scale);
    values.cast(scale, p.v_codes + static_cast<long long>(line) * Cfg::kHeadDim * padded);
    return;
  }
  const int kv_tiles = (p.kv_len + kTileRows - 1) / kTileRows, q_tiles = (p.q_len + kTileRows - 1) / kTileRows;
  const int key_blocks = (kv_tiles + Cfg::kKeyTiles - 1) / Cfg::kKeyTiles;  // of a head
  int item = (cluster < 2 * kv_heads ? cluster / 2 : cluster - kv_heads) * Cfg::kCluster + rank;
  if (item < kv_heads * key_blocks) {
    const int line = item / key_blocks, tile = item % key_blocks * Cfg::kKeyTiles;
    const RowsQuantizer<Cfg> keys(shared.rows, HeadRows<Cfg>(p.k, line / p.kv_heads, line % p.kv_heads, p.kv_len));
    keys.template run<Cfg::kKeyMean>(tile, min(tile + Cfg::kKeyTiles, kv_tiles),
                                     p.k_codes + static_cast<long long>(line) * p.kv_len * Cfg::kHeadDim,
                                     p.k_scale + line * kv_tiles, p.k_mean + line * Cfg::kHeadDim);
    return;
  }
  item -= kv_heads * key_blocks;
  if (item < p.batch * p.heads * q_tiles) {
    const int line = item / q_tiles, tile = item % q_tiles;
    const RowsQuantizer<Cfg> queries(shared.rows, HeadRows<Cfg>(p.q, line / p.heads, line % p.heads, p.q_len));
    queries.template run<false>(tile, tile + 1, p.q_codes + static_cast<long long>(line) * p.q_len * Cfg::kHeadDim,
                                p.q_scale + line * q_tiles, nullptr);
  }
}

}  // namespace greenfast

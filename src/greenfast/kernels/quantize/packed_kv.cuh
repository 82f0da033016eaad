// Quantizes K and V of packed sequences (attention/schedule.cuh) for attention, with the numerics of qkv.cuh for each
// sequence. Layouts: K (kv_heads, rows, kHeadDim), V (kv_heads, kHeadDim, rows). rows: key_blocks * kRowBlock.
#pragma once

#include "attention/schedule.cuh"
#include "ptx/griddepcontrol.cuh"
#include "quantize/rows.cuh"
#include "quantize/values.cuh"

namespace greenfast {

struct QuantizePackedParams {
  QuantizeInput k, v;  // batch_stride is the stride of a row
  unsigned char *k_codes, *v_codes;
  float* k_scale;  // (kv_heads, key_blocks), or (kv_heads, key_blocks, kKeyGroups)
  float* v_scale;  // (kv_heads, key_blocks)
  float* k_mean;   // (batch, kv_heads, kHeadDim), rotated if K is
  const PackedKeys* sequences;
  const int* block_sequence;
  int kv_heads, key_blocks;
};

// Grid: a block per kKeyTiles blocks of K, then one per block of V. Block: Cfg::kThreads.
template <class Cfg>
__device__ __forceinline__ void quantize_packed_kv(const QuantizePackedParams& p) {
  __shared__ union Storage {
    RowsStorage<Cfg> rows;
    VStorage<Cfg> values;
  } shared;
  ptx::launch_dependent_grids();
  ptx::griddepcontrol_wait();  // for the schedule
  const long long rows = static_cast<long long>(p.key_blocks) * kRowBlock;
  const int runs = (p.key_blocks + Cfg::kKeyTiles - 1) / Cfg::kKeyTiles;  // per head
  int item = blockIdx.x;
  if (item < p.kv_heads * runs) {
    const int head = item / runs, stop = min((item % runs + 1) * Cfg::kKeyTiles, p.key_blocks);
    float* const scales = p.k_scale + static_cast<long long>(head) * p.key_blocks * (Cfg::kFineScales ? kKeyGroups : 1);
    for (int tile = item % runs * Cfg::kKeyTiles; tile < stop;) {
      const int b = p.block_sequence[tile];
      int end = tile + 1;
      while (end < stop && p.block_sequence[end] == b) ++end;
      if (b >= 0) {
        const PackedKeys keys = p.sequences[b];
        const int first_block = keys.first_key / kRowBlock;
        const RowsQuantizer<Cfg> rows_quantizer(shared.rows,
                                                HeadRows<Cfg>(p.k, keys.first_input_row, head, keys.kv_len));
        rows_quantizer.quantize_k(rows_quantizer.head, tile - first_block, end - first_block,
                                  p.k_codes + (head * rows + keys.first_key) * Cfg::kHeadDim,
                                  scales + first_block * (Cfg::kFineScales ? kKeyGroups : 1),
                                  p.k_mean + (static_cast<long long>(b) * p.kv_heads + head) * Cfg::kHeadDim);
        __syncthreads();  // all threads have read the shared mean and amax
      }
      tile = end;
    }
    return;
  }
  item -= p.kv_heads * runs;
  const int head = item / p.key_blocks, tile = item % p.key_blocks, b = p.block_sequence[tile];
  // Blocks without a sequence become zeros: a tile of attention can reach into one, and 0 times NaN would be NaN.
  const PackedKeys keys = b < 0 ? PackedKeys{0, tile * kRowBlock, 0, 0} : p.sequences[b];
  VQuantizer<Cfg>::run(
      shared.values, HeadRows<Cfg>(p.v, keys.first_input_row, head, keys.kv_len), tile - keys.first_key / kRowBlock,
      p.v_codes + static_cast<long long>(head) * Cfg::kHeadDim * rows + keys.first_key, static_cast<int>(rows),
      p.v_scale + static_cast<long long>(head) * p.key_blocks + keys.first_key / kRowBlock);
}

}  // namespace greenfast

// Axis: the load of row-major V, (heads, keys, head_dim). One warp of the producer warpgroup loads tiles to separate
// stages; the other three transpose each tile to the layout that TMA gives for the permuted V^T. FlashAttention-3 (Shah
// et al., 2024) transposes in its producer as well.
#pragma once

#include "attention/sm90/load_kv.cuh"
#include "common/bytes.cuh"

namespace greenfast {

template <class Traits>
struct RowMajorStorage : FlashStorage<Traits> {
  static constexpr int kTile = Traits::kBlockN * Traits::kDimPanel;
  alignas(1024) unsigned char rows[Traits::kRowStages][Traits::kDimPanels][kTile];  // row-major V
  ptx::Mbarrier rows_full[Traits::kRowStages], rows_empty[Traits::kRowStages];
};

// All warps of the producer warpgroup except the first.
constexpr int kNumTransposeWarps = 3;

// Transposes a warp's share of a tile: parts of 64 keys and 32 columns, of which a lane takes 16 keys and 4 columns.
//
// Lanes that differ in bit 0 and bits 3, 4 have adjacent words of a row; those that differ in bits 1, 2 have the next
// 16 keys, `group`. So stores have no bank conflicts. Loads would conflict 4-way. So group g reads the keys of each 16
// in the order j ^ 2 g, for which the TMA swizzle selects other banks (2-way conflicts remain at head dim 64). Keys 2
// m, 2 m + 1, 2 m + 8 and 2 m + 9 of each 16 make word m of V^T, so that order exchanges words; exchange() restores
// them.
template <class Traits>
__device__ __forceinline__ void transpose_tile(
    const unsigned char (&rows)[Traits::kDimPanels][RowMajorStorage<Traits>::kTile],
    unsigned char (&v)[Traits::kKeyPanels][Traits::kValueRows * Traits::kKeyPanel], int transpose_warp) {
  constexpr int kKeyParts = Traits::kBlockN / 64, kParts = kKeyParts * (Traits::kHeadDim / 32);
  const int lane = threadIdx.x % 32, group = lane / 2 % 4, word = lane / 8 * 2 + lane % 2;
  const auto exchange = [](unsigned& a, unsigned& b, bool swap) {
    const unsigned temp = a;
    a = swap ? b : a;
    b = swap ? temp : b;
  };
  for (int part = transpose_warp; part < kParts; part += kNumTransposeWarps) {
    const int first_key = part % kKeyParts * 64 + group * 16;
    const int column = part / kKeyParts * 32 + word * 4;
    const unsigned char* panel = rows[column / Traits::kDimPanel];
    const int chunk = column % Traits::kDimPanel / 16;
    unsigned x[16];
#pragma unroll
    for (int j = 0; j < 16; ++j) {
      const int key = first_key + (j ^ 2 * group);
      const int turn = Traits::kDimPanel == 128 ? key % 8 : key / 2 % 4;
      x[j] = *reinterpret_cast<const unsigned*>(panel + key * Traits::kDimPanel + (chunk ^ turn) * 16 + column % 16);
    }
    unsigned y[4][4];  // word m of column i in y[m][i]
#pragma unroll
    for (int m = 0; m < 4; ++m) {
      const unsigned keys[4] = {x[2 * m], x[2 * m + 1], x[2 * m + 8], x[2 * m + 9]};
      transpose_bytes(keys, y[m]);
    }
    unsigned char* out = v[first_key / Traits::kKeyPanel];
    const int out_chunk = first_key % Traits::kKeyPanel / 16;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      exchange(y[0][i], y[1][i], group & 1);
      exchange(y[2][i], y[3][i], group & 1);
      exchange(y[0][i], y[2][i], group & 2);
      exchange(y[1][i], y[3][i], group & 2);
      uint4* dst =
          reinterpret_cast<uint4*>(out + (column + i) * Traits::kKeyPanel + (out_chunk ^ (column + i) % 8) * 16);
      *dst = make_uint4(y[0][i], y[1][i], y[2][i], y[3][i]);
    }
  }
}

// See load_kv.cuh for the members.
template <class Traits>
struct VLoadRowMajor {
  using Storage = RowMajorStorage<Traits>;
  static constexpr int kArrivals = kNumTransposeWarps;
  Ring<Traits::kRowStages> row_ring;

  static __device__ __forceinline__ void init(Storage& shared) {
    for (int r = 0; r < Traits::kRowStages; ++r) {
      shared.rows_full[r].init(1);
      shared.rows_empty[r].init(kNumTransposeWarps);
    }
  }

  __device__ __forceinline__ void fetch(Storage& shared, const ptx::TensorMap& v_map, const Ring<Traits::kStages>&,
                                        int key, const KeyRows& keys) {
    const int r = row_ring.stage;
    shared.rows_empty[r].wait(row_ring.parity ^ 1);
    shared.rows_full[r].arrive_expect(sizeof(shared.rows[r]));
    for (int i = 0; i < Traits::kDimPanels; ++i) {
      ptx::tma_load_3d(shared.rows[r][i], v_map, shared.rows_full[r], i * Traits::kDimPanel, keys.row(key),
                       keys.kv_head);
    }
    row_ring.advance();
  }

  __device__ __forceinline__ void transpose(const FlashParams& p, const StaticScheduler& scheduler, Storage& shared,
                                            int transpose_warp) {
    Ring<Traits::kStages> ring;
    for (int round = 0; scheduler.has(round); ++round) {
      const int index = scheduler.tile(round);
      if (index >= scheduler.tiles) continue;
      const WorkTile<Traits> work(p, index);
      for (int tile = Traits::Mask::n_block_min; tile < work.n_block_max; ++tile, ring.advance(), row_ring.advance()) {
        const int s = ring.stage, r = row_ring.stage;
        shared.rows_full[r].wait(row_ring.parity);
        shared.v_empty[s].wait(ring.parity ^ 1);
        transpose_tile<Traits>(shared.rows[r], shared.v[s], transpose_warp);
        ptx::fence_proxy_async();
        __syncwarp();
        if (threadIdx.x % 32 == 0) {
          shared.v_full[s].arrive();
          shared.rows_empty[r].arrive();
        }
      }
    }
  }
};

}  // namespace greenfast

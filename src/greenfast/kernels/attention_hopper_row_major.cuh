// The Hopper attention kernel on V as its rows lie in a cache, (heads, keys, head_dim): attention_hopper.cuh with V
// transposed on its way. One warp of the fetching warpgroup fetches, the other three turn each tile of V, which was
// copied to a place of its own, into what the copy engine would have brought of V^T with its keys reordered.
// FlashAttention-3 (Shah et al., 2024) transposes in its producer as well.
#pragma once

#include "attention_hopper.cuh"

namespace greenfast {

template <class Cfg>
struct RowMajorStorage : FlashStorage<Cfg> {
  using Shape = FlashShape<Cfg>;
  static constexpr int kTile = Shape::kBlockN * Shape::kDimPanel;
  alignas(1024) unsigned char rows[Cfg::kRowStages][Shape::kDimPanels][kTile];  // of V
  ptx::Mbarrier rows_full[Cfg::kRowStages], rows_empty[Cfg::kRowStages];
};

// Warps that transpose: all of the fetching warpgroup but the first.
constexpr int kTransposers = 3;

// Bytes i of four words become word i of four: x[k] byte i to y[i] byte k.
__device__ __forceinline__ void transpose_bytes(const unsigned (&x)[4], unsigned (&y)[4]) {
  const unsigned low01 = __byte_perm(x[0], x[1], 0x5140), high01 = __byte_perm(x[0], x[1], 0x7362);
  const unsigned low23 = __byte_perm(x[2], x[3], 0x5140), high23 = __byte_perm(x[2], x[3], 0x7362);
  y[0] = __byte_perm(low01, low23, 0x5410);
  y[1] = __byte_perm(low01, low23, 0x7632);
  y[2] = __byte_perm(high01, high23, 0x5410);
  y[3] = __byte_perm(high01, high23, 0x7632);
}

// A warp's share of a tile: pieces of 64 keys and 32 columns, of which a lane takes 16 keys and 4 columns.
//
// Lanes that differ in bit 0 and bits 3, 4 have neighbouring words of a row, those that differ in bits 1, 2 the next 16
// keys, `group`. So eight lanes store into all banks. Their loads would meet in a quarter of these, so group g reads
// the keys of each 16 in an order of its own, j ^ 2 g, for which the copy engine's swizzle has other banks (at head dim
// 64 still half of them). As of each 16 keys 2 m, 2 m + 1, 2 m + 8 and 2 m + 9 make word m of V^T, that order exchanges
// words, and exchange() puts them back.
template <class Cfg>
__device__ __forceinline__ void transpose_tile(const unsigned char (&rows)[FlashShape<Cfg>::kDimPanels]
                                                                          [RowMajorStorage<Cfg>::kTile],
                                               unsigned char (&v)[FlashShape<Cfg>::kKeyPanels]
                                                                 [FlashShape<Cfg>::kValueRows *
                                                                  FlashShape<Cfg>::kKeyPanel],
                                               int transposer) {
  using Shape = FlashShape<Cfg>;
  constexpr int kKeyPieces = Shape::kBlockN / 64, kPieces = kKeyPieces * (Shape::kHeadDim / 32);
  const int lane = threadIdx.x % 32, group = lane / 2 % 4, word = lane / 8 * 2 + lane % 2;
  const auto exchange = [](unsigned& a, unsigned& b, bool wanted) {
    const unsigned kept = a;
    a = wanted ? b : a;
    b = wanted ? kept : b;
  };
  for (int piece = transposer; piece < kPieces; piece += kTransposers) {
    const int first_key = piece % kKeyPieces * 64 + group * 16;
    const int column = piece / kKeyPieces * 32 + word * 4;
    const unsigned char* panel = rows[column / Shape::kDimPanel];
    const int chunk = column % Shape::kDimPanel / 16;
    unsigned x[16];
#pragma unroll
    for (int j = 0; j < 16; ++j) {
      const int key = first_key + (j ^ 2 * group);
      const int turn = Shape::kDimPanel == 128 ? key % 8 : key / 2 % 4;
      x[j] = *reinterpret_cast<const unsigned*>(panel + key * Shape::kDimPanel + (chunk ^ turn) * 16 + column % 16);
    }
    unsigned y[4][4];  // word m of column i in y[m][i]
#pragma unroll
    for (int m = 0; m < 4; ++m) {
      const unsigned keys[4] = {x[2 * m], x[2 * m + 1], x[2 * m + 8], x[2 * m + 9]};
      transpose_bytes(keys, y[m]);
    }
    unsigned char* out = v[first_key / Shape::kKeyPanel];
    const int out_chunk = first_key % Shape::kKeyPanel / 16;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      exchange(y[0][i], y[1][i], group & 1);
      exchange(y[2][i], y[3][i], group & 1);
      exchange(y[0][i], y[2][i], group & 2);
      exchange(y[1][i], y[3][i], group & 2);
      uint4* to = reinterpret_cast<uint4*>(out + (column + i) * Shape::kKeyPanel + (out_chunk ^ (column + i) % 8) * 16);
      *to = make_uint4(y[0][i], y[1][i], y[2][i], y[3][i]);
    }
  }
}

// How V reaches its stages here; TransposedValues says what the members are for.
template <class Cfg>
struct RowMajorValues {
  using Shape = FlashShape<Cfg>;
  using Storage = RowMajorStorage<Cfg>;
  static constexpr int kArrivals = kTransposers;
  Ring<Cfg::kRowStages> row_ring;

  static __device__ __forceinline__ void init(Storage& shared) {
    for (int r = 0; r < Cfg::kRowStages; ++r) {
      shared.rows_full[r].init(1);
      shared.rows_empty[r].init(kTransposers);
    }
  }

  __device__ __forceinline__ void fetch(Storage& shared, const ptx::TensorMap& v_map, const Ring<Shape::kStages>&,
                                        int key, int kv_head) {
    const int r = row_ring.stage;
    shared.rows_empty[r].wait(row_ring.parity ^ 1);
    shared.rows_full[r].arrive_expect(sizeof(shared.rows[r]));
    for (int i = 0; i < Shape::kDimPanels; ++i) {
      ptx::tma_load_3d(shared.rows[r][i], v_map, shared.rows_full[r], i * Shape::kDimPanel, key, kv_head);
    }
    row_ring.advance();
  }

  __device__ __forceinline__ void transpose(const FlashParams& p, Storage& shared, int transposer, int pieces) {
    Ring<Shape::kStages> ring;
    for (int round = 0; round * static_cast<int>(gridDim.x) < pieces; ++round) {
      const int piece = piece_of(round);
      if (piece >= pieces) continue;
      const Work<Cfg> work(p, piece);
      for (int tile = 0; tile < work.tiles; ++tile, ring.advance(), row_ring.advance()) {
        const int s = ring.stage, r = row_ring.stage;
        shared.rows_full[r].wait(row_ring.parity);
        shared.v_empty[s].wait(ring.parity ^ 1);
        transpose_tile<Cfg>(shared.rows[r], shared.v[s], transposer);
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

// Grid, block and dynamic shared memory: as for attention_hopper.
template <class Cfg>
__device__ __forceinline__ void attention_hopper_row_major(const FlashParams& p, const ptx::TensorMap& q_map,
                                                           const ptx::TensorMap& k_map, const ptx::TensorMap& v_map) {
  attention_hopper<Cfg, CodedQueries<Cfg>, RowMajorValues<Cfg>>(p, q_map, k_map, v_map);
}

}  // namespace greenfast

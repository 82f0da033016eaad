// What the fetching warp of the Hopper attention kernel does: tiles of Q, K and V by TMA.
//
// Where Q comes from, and where V, are classes of their own: CodedQueries (hopper_queries.cuh) and TransposedValues, or
// others in their places.
#pragma once

#include "hopper_plan.cuh"
#include "ptx/tma.cuh"

namespace greenfast {

// How V reaches its stages: here as TMA brings it. RowMajorValues (attention_hopper_row_major.cuh) is the other way.
template <class Cfg>
struct TransposedValues {
  using Shape = FlashShape<Cfg>;
  using Storage = FlashStorage<Cfg>;
  static constexpr int kArrivals = 1;  // that fill a stage

  static __device__ __forceinline__ void init(Storage&) {}  // barriers that FlashStorage lacks

  // A tile, by the thread that fetches.
  __device__ __forceinline__ void fetch(Storage& shared, const ptx::TensorMap& v_map, const Ring<Shape::kStages>& ring,
                                        int key, int kv_head) {
    const int s = ring.stage;
    shared.v_empty[s].wait(ring.parity ^ 1);
    shared.v_full[s].arrive_expect(Shape::kHeadDim * Shape::kBlockN);
    for (int i = 0; i < Shape::kKeyPanels; ++i) {
      ptx::tma_load_3d(shared.v[s][i], v_map, shared.v_full[s], key + i * Shape::kKeyPanel, 0, kv_head);
    }
  }

  // All tiles, by the fetching warpgroup's other warps.
  __device__ __forceinline__ void transpose(const FlashParams&, Storage&, int, int) {}
};

template <class Cfg, class Storage, class Queries, class Values>
__device__ __forceinline__ void produce(const FlashParams& p, Storage& shared, Queries& queries,
                                        Values& values, const ptx::TensorMap& k_map, const ptx::TensorMap& v_map,
                                        int pieces) {
  using Shape = FlashShape<Cfg>;
  Ring<Shape::kStages> ring;
  for (int round = 0; round * static_cast<int>(gridDim.x) < pieces; ++round) {
    const int piece = piece_of(round);
    if (piece >= pieces) continue;
    const Work<Cfg> work(p, piece);
    const int kv_head = work.head / p.heads_per_kv;
    queries.fetch(shared, work);
    for (int tile = 0; tile < work.tiles; ++tile, ring.advance()) {
      const int s = ring.stage, key = tile * Shape::kBlockN;
      shared.k_empty[s].wait(ring.parity ^ 1);
      shared.k_full[s].arrive_expect(sizeof(shared.k[s]));
      for (int i = 0; i < Shape::kDimPanels; ++i) {
        ptx::tma_load_3d(shared.k[s][i], k_map, shared.k_full[s], i * Shape::kDimPanel, key, kv_head);
      }
      values.fetch(shared, v_map, ring, key, kv_head);
    }
  }
}

}  // namespace greenfast

// Axis: the load of K and V. What the producer's thread does for each work tile, by TMA.
//
// A loader of V has fetch(shared, map, ring, key, keys), by the producer's thread for each tile; transpose(scheduler,
// shared, warp), by the producer warpgroup's other three warps for all work tiles; kArrivals, the arrivals that fill a
// stage; Storage, with its own shared memory; and init(shared), by one thread, for barriers that FlashStorage lacks.
// Here is TransposedValues; RowMajorValues (load_v_row_major.cuh) is the other one. Pages of a cache would be loaders
// that look up where a key's rows lie: nothing else knows.
#pragma once

#include "attention/scheduler.cuh"
#include "attention/sm90/traits.cuh"
#include "ptx/tma.cuh"

namespace greenfast {

// V as a quantizer leaves it: transposed, its keys in the order that kernel.cuh says.
template <class Traits>
struct TransposedValues {
  using Storage = FlashStorage<Traits>;
  static constexpr int kArrivals = 1;

  static __device__ __forceinline__ void init(Storage&) {}

  __device__ __forceinline__ void fetch(Storage& shared, const ptx::TensorMap& v_map,
                                        const Ring<Traits::kStages>& ring, int key, const KeyRows& keys) {
    const int s = ring.stage;
    shared.v_empty[s].wait(ring.parity ^ 1);
    shared.v_full[s].arrive_expect(Traits::kHeadDim * Traits::kBlockN);
    for (int i = 0; i < Traits::kKeyPanels; ++i) {
      ptx::tma_load_3d(shared.v[s][i], v_map, shared.v_full[s], keys.row(key + i * Traits::kKeyPanel), 0,
                       keys.kv_head);
    }
  }

  __device__ __forceinline__ void transpose(const FlashParams&, const StaticScheduler&, Storage&, int) {}
};

template <class Traits>
__device__ __forceinline__ void fetch_keys(FlashStorage<Traits>& shared, const ptx::TensorMap& k_map,
                                           const Ring<Traits::kStages>& ring, int key, const KeyRows& keys) {
  const int s = ring.stage;
  shared.k_empty[s].wait(ring.parity ^ 1);
  shared.k_full[s].arrive_expect(sizeof(shared.k[s]));
  for (int i = 0; i < Traits::kDimPanels; ++i) {
    ptx::tma_load_3d(shared.k[s][i], k_map, shared.k_full[s], i * Traits::kDimPanel, keys.row(key),
                     keys.kv_head);
  }
}

// All work tiles of a block, by the producer's thread.
template <class Traits, class Storage, class Queries, class Values>
__device__ __forceinline__ void produce(const FlashParams& p, const StaticScheduler& scheduler, Storage& shared,
                                        Queries& queries, Values& values, const ptx::TensorMap& k_map,
                                        const ptx::TensorMap& v_map) {
  Ring<Traits::kStages> ring;
  for (int round = 0; scheduler.has(round); ++round) {
    const int index = scheduler.tile(round);
    if (index >= scheduler.tiles) continue;
    const WorkTile<Traits> work(p, index);
    const Sequence sequence{p, work.head};
    const KeyRows keys = sequence.key_rows();
    queries.fetch(shared, sequence, work.first_row, ring);
    for (int tile = Traits::Mask::first_tile; tile < work.stop_tile; ++tile, ring.advance()) {
      const int key = tile * Traits::kBlockN;
      fetch_keys<Traits>(shared, k_map, ring, key, keys);
      values.fetch(shared, v_map, ring, key, keys);
    }
  }
}

}  // namespace greenfast

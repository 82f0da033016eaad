// Axis: the load of K and V by TMA, by one thread of the producer warp. V is as the quantizer writes it: transposed, keys
// permuted (kernel.cuh). A paged cache would be another loader: nothing else depends on the address of a key.
#pragma once

#include "attention/scheduler.cuh"
#include "attention/sm90/traits.cuh"
#include "ptx/tma.cuh"

namespace greenfast {

template <class Traits>
__device__ __forceinline__ void load_k(FlashStorage<Traits>& shared, const ptx::TensorMap& k_map,
                                       const Ring<Traits::kStages>& ring, int key, const typename Traits::Keys& keys) {
  const int s = ring.stage;
  shared.k_empty[s].wait(ring.parity ^ 1);
  shared.k_full[s].arrive_expect(sizeof(shared.k[s]));
  for (int i = 0; i < Traits::kDimPanels; ++i) {
    ptx::tma_load_3d(shared.k[s][i], k_map, shared.k_full[s], i * Traits::kDimPanel, keys.row(key), keys.kv_head);
  }
}

template <class Traits>
__device__ __forceinline__ void load_v(FlashStorage<Traits>& shared, const ptx::TensorMap& v_map,
                                       const Ring<Traits::kStages>& ring, int key, const typename Traits::Keys& keys) {
  const int s = ring.stage;
  shared.v_empty[s].wait(ring.parity ^ 1);
  shared.v_full[s].arrive_expect(Traits::kHeadDim * Traits::kBlockN);
  for (int i = 0; i < Traits::kKeyPanels; ++i) {
    ptx::tma_load_3d(shared.v[s][i], v_map, shared.v_full[s], keys.row(key + i * Traits::kKeyPanel), 0, keys.kv_head);
  }
}

// The load loop over all work tiles of a block. Called by the producer thread.
template <class Traits, class Scheduler, class Storage, class QLoad>
__device__ __forceinline__ void produce(const FlashParams& p, Scheduler& scheduler, Storage& shared, QLoad& q_load,
                                        const ptx::TensorMap& k_map, const ptx::TensorMap& v_map) {
  Ring<Traits::kStages> ring;
  for (int round = 0; scheduler.has(round); ++round) {
    const int index = scheduler.tile(round);
    if (index >= scheduler.tiles) continue;
    const WorkTile<Traits> work(p, index);
    const typename Traits::Sequence sequence{p, work.head};
    const typename Traits::Keys keys = sequence.key_rows();
    q_load.fetch(shared, sequence, work.first_row, ring);
    if constexpr (Traits::kListed) {
      const TileList list(p, sequence.head, work.first_row);
      for (int i = 0; i < list.count; ++i, ring.advance()) {
        const int key = list.tile(p, i) * Traits::kBlockN;
        load_k<Traits>(shared, k_map, ring, key, keys);
        load_v<Traits>(shared, v_map, ring, key, keys);
      }
    } else {
      for (int tile = Traits::kWindow ? work.n_block_min(p) : 0; tile < work.n_block_max; ++tile, ring.advance()) {
        const int key = tile * Traits::kBlockN;
        load_k<Traits>(shared, k_map, ring, key, keys);
        load_v<Traits>(shared, v_map, ring, key, keys);
      }
    }
  }
}

}  // namespace greenfast

// Axis: the load of Q with fused quantization through the K and V stages, for head dim 256, where shared memory has no
// room for the 16-bit Q. 128 rows of 16 bits take as much memory as a tile of K and one of V: rows 0 .. 63 are loaded
// to the next K stage, the others to the next V stage. Otherwise as load_q_input.cuh.
#pragma once

#include "attention/sm90/load_q_input.cuh"

namespace greenfast {

template <class Traits>
struct QLoadFuseQuantStaged {
  using Source = QInput;
  using Input = QLoadFuseQuant<Traits>;
  using Rows = typename Input::Rows;
  template <class Tiles>
  using Storage = Tiles;
  static_assert(Traits::kConsumers <= 2 && Traits::kBlockN == 2 * Traits::kRows, "a stage holds the rows of a block");

  const QInput& source;

  __device__ __forceinline__ explicit QLoadFuseQuantStaged(const QInput& source) : source(source) {}

  __device__ __forceinline__ void begin() const { ptx::prefetch_map(source.map); }

  // The buffer of a warpgroup's rows.
  __device__ __forceinline__ static typename Traits::In* q_stage(FlashStorage<Traits>& shared, int stage,
                                                                 int warpgroup) {
    static_assert(sizeof(shared.k[0]) == Traits::kRows * Traits::kHeadDim * sizeof(typename Traits::In), "64 rows");
    return reinterpret_cast<typename Traits::In*>(warpgroup == 0 ? shared.k[stage][0] : shared.v[stage][0]);
  }

  __device__ __forceinline__ void fetch(FlashStorage<Traits>& shared, const typename Traits::Sequence& sequence,
                                        int first_row, Ring<Traits::kStages>& ring) {
    const int s = ring.stage;
    shared.k_empty[s].wait(ring.parity ^ 1);
    shared.v_empty[s].wait(ring.parity ^ 1);
    for (int w = 0; w < 2; ++w) {
      ptx::Mbarrier& full = w == 0 ? shared.k_full[s] : shared.v_full[s];
      if (w >= Traits::kConsumers) {
        full.arrive();
        continue;
      }
      full.arrive_expect(sizeof(shared.k[0]));
      ptx::tma_load_4d(q_stage(shared, s, w), source.map, full, 0, sequence.q_row(first_row + w * Traits::kRows),
                       sequence.head % source.heads, sequence.head / source.heads);
    }
    ring.advance();
    ptx::griddepcontrol_wait();  // the next loads are K and V, the previous kernel's output
  }

  template <class Loop, int kCount>
  __device__ __forceinline__ void prepare(const FlashParams&, FlashStorage<Traits>& shared, int warpgroup,
                                          const typename Traits::Sequence& sequence, int first_row, Loop& mainloop,
                                          float (&q_scale)[kCount]) {
    Ring<Traits::kStages>& ring = mainloop.k_ring;  // the V ring is at the same stage
    shared.k_full[ring.stage].wait(ring.parity);
    shared.v_full[ring.stage].wait(ring.parity);
    typename Rows::Values x;
    Input::read(q_stage(shared, ring.stage, warpgroup), sequence.q_len() - first_row, x);
    ptx::fence_proxy_async();  // as in load_q_input.cuh
    __syncwarp();
    if (threadIdx.x % 32 == 0) {
      shared.k_empty[ring.stage].arrive();
      shared.v_empty[ring.stage].arrive();
    }
    ring.advance();
    mainloop.v_ring = ring;
    Input::write(x, shared, warpgroup, sequence.q_len() - first_row, q_scale);
  }

  __device__ __forceinline__ void wait(FlashStorage<Traits>&, int warpgroup) const { Input::sync_warpgroup(warpgroup); }
  __device__ __forceinline__ void release(FlashStorage<Traits>&, int) const {}
};

}  // namespace greenfast

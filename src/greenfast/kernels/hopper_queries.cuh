// How Q reaches the Hopper attention kernel as codes that a quantizer has left: by TMA.
#pragma once

#include "hopper_plan.cuh"
#include "ptx/tma.cuh"

namespace greenfast {

template <class Cfg>
struct CodedQueries {
  using Shape = FlashShape<Cfg>;
  using Source = ptx::TensorMap;
  template <class Tiles>
  using Storage = Tiles;  // no more than FlashStorage

  const ptx::TensorMap& map;
  unsigned parity = 0;  // of the rounds

  __device__ __forceinline__ explicit CodedQueries(const ptx::TensorMap& map) : map(map) {}

  // By the thread that fetches, before its first piece.
  __device__ __forceinline__ void begin() const { ptx::prefetch_map(map); }

  // A piece's rows, by the thread that fetches.
  __device__ __forceinline__ void fetch(FlashStorage<Cfg>& shared, const Work<Cfg>& work) {
    for (int w = 0; w < Shape::kConsumers; ++w) {
      shared.q_empty[w].wait(parity ^ 1);
      shared.q_full[w].arrive_expect(sizeof(shared.q[w]));
      for (int i = 0; i < Shape::kDimPanels; ++i) {
        ptx::tma_load_3d(shared.q[w][i], map, shared.q_full[w], i * Shape::kDimPanel,
                         work.first_row + w * Shape::kRows, work.head);
      }
    }
    parity ^= 1;
  }

  // What follows is for all threads of a computing warpgroup. First the scale of a thread's rows, the same for a warp:
  // rows behind the last have that row's.
  __device__ __forceinline__ float prepare(const FlashParams& p, FlashStorage<Cfg>&, int, int head, int first_row) {
    if constexpr (Cfg::kQueryBlockScales) {
      const int blocks = (p.q_len + kQueryBlock - 1) / kQueryBlock;
      const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32 % 4, 0);  // known to be uniform: saves registers
      return p.q_scale[static_cast<size_t>(head) * blocks + min(first_row / kQueryBlock + warp, blocks - 1)];
    } else {
      return p.q_scale[head];
    }
  }

  // Until its rows may be read.
  __device__ __forceinline__ void wait(FlashStorage<Cfg>& shared, int warpgroup) {
    shared.q_full[warpgroup].wait(parity);
    parity ^= 1;
  }

  // Its rows have been read.
  __device__ __forceinline__ void release(FlashStorage<Cfg>& shared, int warpgroup) const {
    if (threadIdx.x % 32 == 0) shared.q_empty[warpgroup].arrive();
  }
};

}  // namespace greenfast

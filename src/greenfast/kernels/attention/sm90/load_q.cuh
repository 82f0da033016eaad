// Axis: the load of Q. This file: a quantized Q, by TMA.
//
// A loader of Q has these members. For the producer thread: begin(), once before the first work tile; fetch(shared,
// sequence, first_row, ring) for each work tile (ring: of K and V). For all threads of a consumer warpgroup, in this
// order for each work tile: prepare(...) returns the scales of a thread's rows; after wait(...) Storage::q may be read,
// after release(...) overwritten. Source: the kernel argument in place of Q's tensor map. Storage<Tiles>: Tiles with
// the loader's own shared memory.
//
// The others are QLoadFuseQuant (load_q_input.cuh) and QLoadFuseQuantStaged (load_q_staged.cuh).
#pragma once

#include "attention/scheduler.cuh"
#include "attention/sm90/traits.cuh"
#include "ptx/tma.cuh"

namespace greenfast {

// The scale of rows after the last one, with fine scales. A large score scale changes the rounding of its warp's row
// sums (subtract_shift in softmax.cuh). So these rows get the same small scale from every loader.
constexpr float kPaddingRowScale = 1.88079096e-37f;  // 2^-122, the quantizer's minimum

template <class Traits>
struct QLoadQuantized {
  using Source = ptx::TensorMap;
  template <class Tiles>
  using Storage = Tiles;

  const ptx::TensorMap& map;
  unsigned parity = 0;  // mbarrier parity, flips every work tile

  __device__ __forceinline__ explicit QLoadQuantized(const ptx::TensorMap& map) : map(map) {}

  __device__ __forceinline__ void begin() const { ptx::prefetch_map(map); }

  __device__ __forceinline__ void fetch(FlashStorage<Traits>& shared, const typename Traits::Sequence& sequence,
                                        int first_row, Ring<Traits::kStages>&) {
    for (int w = 0; w < Traits::kConsumers; ++w) {
      shared.q_empty[w].wait(parity ^ 1);
      shared.q_full[w].arrive_expect(sizeof(shared.q[w]));
      for (int i = 0; i < Traits::kDimPanels; ++i) {
        ptx::tma_load_3d(shared.q[w][i], map, shared.q_full[w], i * Traits::kDimPanel,
                         sequence.q_row(first_row + w * Traits::kRows), sequence.head);
      }
    }
    parity ^= 1;
  }

  // Without fine scales all rows of a warp have the same scale.
  template <class Loop, int kCount>
  __device__ __forceinline__ void prepare(const FlashParams& p, FlashStorage<Traits>&, int,
                                          const typename Traits::Sequence& sequence, int first_row, Loop&,
                                          float (&q_scale)[kCount]) {
    if constexpr (Traits::kFineScales) {
      const int row = first_row + threadIdx.x / 32 % 4 * kQueryBlock + threadIdx.x % 32 / 4;
      const float* const head_scales = p.q_scale + static_cast<size_t>(sequence.head) * sequence.q_len();
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        q_scale[r] = row + 8 * r < sequence.q_len() ? head_scales[row + 8 * r] : kPaddingRowScale;
      }
    } else if constexpr (Traits::kQueryBlockScales) {
      const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32 % 4, 0);  // uniform for the compiler: saves registers
      q_scale[0] = p.q_scale[sequence.first_q_block() + min(first_row / kQueryBlock + warp, sequence.q_blocks() - 1)];
    } else {
      q_scale[0] = p.q_scale[sequence.head];
    }
  }

  __device__ __forceinline__ void wait(FlashStorage<Traits>& shared, int warpgroup) {
    shared.q_full[warpgroup].wait(parity);
    parity ^= 1;
  }

  __device__ __forceinline__ void release(FlashStorage<Traits>& shared, int warpgroup) const {
    if (threadIdx.x % 32 == 0) shared.q_empty[warpgroup].arrive();
  }
};

}  // namespace greenfast

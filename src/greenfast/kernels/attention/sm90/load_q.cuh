// Axis: the load of Q. Here Q comes as codes that a quantizer has left, by TMA.
//
// A loader of Q has, for the producer's thread: begin() before the first work tile, and fetch(shared, sequence,
// first_row, ring) for each, ring being that of K and V. For all threads of a consumer warpgroup, in this order for each
// work tile: prepare(...), which gives the scales of a thread's rows, or of all; wait(...), after which the warpgroup's
// codes may be read from Storage::q;
// release(...), after which they may be overwritten. Source is what the kernel gets in place of Q's tensor map, and
// Storage<Tiles> what Tiles becomes with its own shared memory. Others are InputQueries (load_q_input.cuh) and
// StagedQueries (load_q_staged.cuh).
#pragma once

#include "attention/scheduler.cuh"
#include "attention/sm90/traits.cuh"
#include "ptx/tma.cuh"

namespace greenfast {

// With fine scales, that of a row behind the last: steep scores of one row make its warp's sums round otherwise
// (take_shift in softmax.cuh), so however Q comes, these rows have one scale that is never steep.
constexpr float kScaleBehindRows = 1.88079096e-37f;  // 2^-122, the least that the quantizer gives

template <class Traits>
struct CodedQueries {
  using Source = ptx::TensorMap;
  template <class Tiles>
  using Storage = Tiles;

  const ptx::TensorMap& map;
  unsigned parity = 0;  // of the rounds

  __device__ __forceinline__ explicit CodedQueries(const ptx::TensorMap& map) : map(map) {}

  __device__ __forceinline__ void begin() const { ptx::prefetch_map(map); }

  __device__ __forceinline__ void fetch(FlashStorage<Traits>& shared, const Sequence& sequence, int first_row,
                                        Ring<Traits::kStages>&) {
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

  // Without fine scales it is the same for a warp.
  template <class Loop, int kCount>
  __device__ __forceinline__ void prepare(const FlashParams& p, FlashStorage<Traits>&, int, const Sequence& sequence,
                                          int first_row, Loop&, float (&q_scale)[kCount]) {
    if constexpr (Traits::kFineScales) {
      const int row = first_row + threadIdx.x / 32 % 4 * kQueryBlock + threadIdx.x % 32 / 4;
      const float* const of_head = p.q_scale + static_cast<size_t>(sequence.head) * sequence.q_len();
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        q_scale[r] = row + 8 * r < sequence.q_len() ? of_head[row + 8 * r] : kScaleBehindRows;
      }
    } else if constexpr (Traits::kQueryBlockScales) {
      const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32 % 4, 0);  // known to be uniform: saves registers
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

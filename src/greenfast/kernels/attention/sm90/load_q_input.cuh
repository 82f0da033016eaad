// Axis: the load of Q, as its caller has it. TMA brings a work tile's rows while the one before is computed, and a
// consumer warpgroup rotates them and leaves their codes where TMA would. A warp's 16 rows share a scale, unless scales
// are fine.
//
// Q is read once, so quantizing it in another launch would only move it to memory and back. Where the launch may begin
// early, the rows of the first work tile are read and cast while the quantizer of K and V ends.
#pragma once

#include "attention/sm90/load_q.cuh"
#include "common/named_barriers.cuh"
#include "ptx/griddepcontrol.cuh"
#include "quantize/rows_transform.cuh"

namespace greenfast {

struct QueryInput {
  const ptx::TensorMap& map;  // (batch, heads, q_len, kQueryColumns) of Traits::In
  int heads;                  // of a batch
};

template <class Traits>
struct InputQueries {
  using Source = QueryInput;

  struct RowsCfg {
    static constexpr int kHeadDim = Traits::kHeadDim;
    static constexpr int kColumns = Traits::kQueryColumns;
    static constexpr bool kRotate = true;
    static constexpr bool kInt8 = Traits::kInt8;
    using In = typename Traits::In;
  };
  using Rows = RowsTransform<RowsCfg, 1>;

  template <class Tiles>
  struct Storage : Tiles {
    // Zeros where the input has no row or column.
    alignas(1024) typename Traits::In input[Traits::kConsumers][Traits::kRows * Traits::kHeadDim];
  };

  const QueryInput& source;
  unsigned parity = 0;  // of the rounds

  __device__ __forceinline__ explicit InputQueries(const QueryInput& source) : source(source) {}

  __device__ __forceinline__ void begin() const { ptx::prefetch_map(source.map); }

  template <class Shared>
  __device__ __forceinline__ void fetch(Shared& shared, const Sequence& sequence, int first_row,
                                        Ring<Traits::kStages>&) {
    for (int w = 0; w < Traits::kConsumers; ++w) {
      shared.q_empty[w].wait(parity ^ 1);
      shared.q_full[w].arrive_expect(sizeof(shared.input[w]));
      ptx::tma_load_4d(shared.input[w], source.map, shared.q_full[w], 0,
                       sequence.q_row(first_row + w * Traits::kRows), sequence.head % source.heads,
                       sequence.head / source.heads);
    }
    parity ^= 1;
    ptx::griddepcontrol_wait();  // what is fetched next are codes of K and V
  }

  // The four warps of a consumer warpgroup wait for each other.
  __device__ __forceinline__ static void meet(int warpgroup) {
    ptx::barrier_sync(Sm90Barrier::kWarpgroup + warpgroup, 128);
  }

  // This thread's share of a warpgroup's 64 rows, rotated.
  __device__ __forceinline__ static void read(const typename Traits::In* input, typename Rows::Values& x) {
    const int within = threadIdx.x / 32 % 4 * kQueryBlock + Rows::row_of_warp(), row[2] = {within, within + 8};
    const auto load = [&](int r, int column) {
      return *reinterpret_cast<const typename Rows::Loaded*>(input + row[r] * Traits::kHeadDim + column);
    };
    Rows().transform(load, x);
  }

  // Leaves its codes in Storage::q, and gives the scales. rows: of the warpgroup, before the sequence ends.
  template <int kCount>
  __device__ __forceinline__ static void write(const typename Rows::Values& x, FlashStorage<Traits>& shared,
                                               int warpgroup, int rows, float (&q_scale)[kCount]) {
    const int within = threadIdx.x / 32 % 4 * kQueryBlock + Rows::row_of_warp(), row[2] = {within, within + 8};
    float scale[2];
    if constexpr (Traits::kFineScales) {
#pragma unroll
      for (int r = 0; r < 2; ++r) scale[r] = Rows::scale_for(over_quad(Rows::largest(x, r)));
    } else {
      scale[0] = scale[1] = Rows::scale_for(over_warp(Rows::largest(x)));
    }
    meet(warpgroup);  // all have read the codes before
    Rows().cast(x, scale, [&](int r, int column, const typename Rows::Codes& codes) {
      const int byte = row[r] * Traits::kDimPanel + column % Traits::kDimPanel;
      constexpr int kChunks = Traits::kDimPanel / 16;  // of a row, which the swizzle exchanges
      unsigned char* panel = shared.q[warpgroup][column / Traits::kDimPanel];
      *reinterpret_cast<typename Rows::Codes*>(panel + (byte ^ byte / 128 % kChunks * 16)) = codes;
    });
    ptx::fence_proxy_async();
    ptx::griddepcontrol_wait();  // what follows reads scales of K and V
    if constexpr (Traits::kFineScales) {
#pragma unroll
      for (int r = 0; r < 2; ++r) q_scale[r] = row[r] < rows ? scale[r] : kScaleBehindRows;
    } else {
      q_scale[0] = __shfl_sync(0xffffffffu, scale[0], 0);  // known to be uniform: saves a register
    }
  }

  template <class Shared, class Loop, int kCount>
  __device__ __forceinline__ void prepare(const FlashParams&, Shared& shared, int warpgroup,
                                          const Sequence& sequence, int first_row, Loop&, float (&q_scale)[kCount]) {
    typename Rows::Values x;
    shared.q_full[warpgroup].wait(parity);
    parity ^= 1;
    read(shared.input[warpgroup], x);
    ptx::fence_proxy_async();  // reads are over before TMA may overwrite what they read
    __syncwarp();
    if (threadIdx.x % 32 == 0) shared.q_empty[warpgroup].arrive();
    write(x, shared, warpgroup, sequence.q_len() - first_row, q_scale);
  }

  template <class Shared>
  __device__ __forceinline__ void wait(Shared&, int warpgroup) const { meet(warpgroup); }
  template <class Shared>
  __device__ __forceinline__ void release(Shared&, int) const {}
};

}  // namespace greenfast

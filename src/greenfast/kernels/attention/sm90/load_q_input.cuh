// Axis: the load of Q with fused quantization. TMA loads the 16-bit rows of a work tile during the previous one. A
// consumer warpgroup rotates and quantizes them into Storage::q. The 16 rows of a warp share a scale, unless scales are
// fine.
//
// Q is read once, so a separate quantization kernel would only add a round trip to memory. With programmatic dependent
// launch, the first work tile's rows are loaded and quantized while the quantizer of K and V finishes.
#pragma once

#include "attention/sm90/load_q.cuh"
#include "common/named_barriers.cuh"
#include "ptx/griddepcontrol.cuh"
#include "quantize/rows_transform.cuh"

namespace greenfast {

struct QInput {
  const ptx::TensorMap& map;  // (batch, heads, q_len, kQColumns) of Traits::In
  int heads;
};

template <class Traits>
struct QLoadFuseQuant {
  using Source = QInput;

  struct RowsCfg {
    static constexpr int kHeadDim = Traits::kHeadDim;
    static constexpr int kColumns = Traits::kQColumns;
    static constexpr bool kRotate = true;
    static constexpr bool kInt8 = Traits::kInt8;
    using In = typename Traits::In;
  };
  using Rows = RowsTransform<RowsCfg, 1>;

  template <class Tiles>
  struct Storage : Tiles {
    // TMA fills missing rows and columns with zeros.
    alignas(1024) typename Traits::In input[Traits::kConsumers][Traits::kRows * Traits::kHeadDim];
  };

  const QInput& source;
  unsigned parity = 0;  // mbarrier parity, flips every work tile

  __device__ __forceinline__ explicit QLoadFuseQuant(const QInput& source) : source(source) {}

  __device__ __forceinline__ void begin() const { ptx::prefetch_map(source.map); }

  template <class Shared>
  __device__ __forceinline__ void fetch(Shared& shared, const typename Traits::Sequence& sequence, int first_row,
                                        Ring<Traits::kStages>&) {
    for (int w = 0; w < Traits::kConsumers; ++w) {
      shared.q_empty[w].wait(parity ^ 1);
      shared.q_full[w].arrive_expect(sizeof(shared.input[w]));
      ptx::tma_load_4d(shared.input[w], source.map, shared.q_full[w], 0, sequence.q_row(first_row + w * Traits::kRows),
                       sequence.head % source.heads, sequence.head / source.heads);
    }
    parity ^= 1;
    ptx::griddepcontrol_wait();  // the next loads are K and V, the previous kernel's output
  }

  // Barrier of the four warps of a consumer warpgroup.
  __device__ __forceinline__ static void sync_warpgroup(int warpgroup) {
    ptx::barrier_sync(Sm90Barrier::kWarpgroup + warpgroup, 128);
  }

  // Loads this thread's part of the warpgroup's 64 rows, and rotates it. rows: how many are before the sequence's end.
  __device__ __forceinline__ static void read(const typename Traits::In* input, int rows, typename Rows::Values& x) {
    const int row_in_tile = threadIdx.x / 32 % 4 * kQueryBlock + Rows::row_of_warp(),
              row[2] = {row_in_tile, row_in_tile + 8};
    const auto load = [&](int r, int column) {
      return *reinterpret_cast<const typename Rows::Loaded*>(input + row[r] * Traits::kHeadDim + column);
    };
    Rows().transform(load, x);
    if constexpr (Traits::kScheduled) Rows::zero_rows_from(x, row, rows);  // they are another sequence's
  }

  // Quantizes it to Storage::q and returns the scales. rows: of the warpgroup before the end of the sequence.
  template <int kCount>
  __device__ __forceinline__ static void write(const typename Rows::Values& x, FlashStorage<Traits>& shared,
                                               int warpgroup, int rows, float (&q_scale)[kCount]) {
    const int row_in_tile = threadIdx.x / 32 % 4 * kQueryBlock + Rows::row_of_warp(),
              row[2] = {row_in_tile, row_in_tile + 8};
    float scale[2];
    if constexpr (Traits::kFineScales) {
#pragma unroll
      for (int r = 0; r < 2; ++r) scale[r] = Rows::scale_for(quad_max_nan(Rows::largest(x, r)));
    } else {
      scale[0] = scale[1] = Rows::scale_for(warp_max_nan(Rows::largest(x)));
    }
    sync_warpgroup(warpgroup);  // all warps have finished reading the previous Q
    Rows().cast(x, scale, [&](int r, int column, const typename Rows::Codes& codes) {
      const int byte = row[r] * Traits::kDimPanel + column % Traits::kDimPanel;
      constexpr int kChunks = Traits::kDimPanel / 16;  // 16-byte chunks of a row, permuted by the swizzle
      unsigned char* panel = shared.q[warpgroup][column / Traits::kDimPanel];
      *reinterpret_cast<typename Rows::Codes*>(panel + (byte ^ byte / 128 % kChunks * 16)) = codes;
    });
    ptx::fence_proxy_async();
    ptx::griddepcontrol_wait();  // the code below reads scales of K and V, the previous kernel's output
    if constexpr (Traits::kFineScales) {
#pragma unroll
      for (int r = 0; r < 2; ++r) q_scale[r] = row[r] < rows ? scale[r] : kPaddingRowScale;
    } else {
      q_scale[0] = __shfl_sync(0xffffffffu, scale[0], 0);  // uniform for the compiler: saves a register
    }
  }

  template <class Shared, class Loop, int kCount>
  __device__ __forceinline__ void prepare(const FlashParams&, Shared& shared, int warpgroup,
                                          const typename Traits::Sequence& sequence, int first_row, Loop&,
                                          float (&q_scale)[kCount]) {
    typename Rows::Values x;
    shared.q_full[warpgroup].wait(parity);
    parity ^= 1;
    read(shared.input[warpgroup], sequence.q_len() - first_row, x);
    ptx::fence_proxy_async();  // order these reads before the TMA write that reuses the buffer
    __syncwarp();
    if (threadIdx.x % 32 == 0) shared.q_empty[warpgroup].arrive();
    write(x, shared, warpgroup, sequence.q_len() - first_row, q_scale);
  }

  template <class Shared>
  __device__ __forceinline__ void wait(Shared&, int warpgroup) const {
    sync_warpgroup(warpgroup);
  }
  template <class Shared>
  __device__ __forceinline__ void release(Shared&, int) const {}
};

}  // namespace greenfast

// The Hopper attention kernel on Q as its caller has it: TMA brings a piece's rows while the piece before is computed, and
// a computing warpgroup rotates them and leaves their codes where TMA would. A warp's 16 rows share a scale.
//
// Q is read once, so a pass of its own would only move it to memory and back. The rows of the first piece are read and
// cast while the quantizer of K and V ends: the launch may begin early.
#pragma once

#include "attention_hopper.cuh"
#include "ptx/grid_order.cuh"
#include "rows_transform.cuh"

namespace greenfast {

struct QueryInput {
  const ptx::TensorMap& map;  // (batch, heads, q_len, kQueryColumns) of Cfg::In
  int heads;                  // of a batch
};

template <class Cfg>
struct InputQueries {
  using Shape = FlashShape<Cfg>;
  using Source = QueryInput;

  struct RowsCfg {
    static constexpr int kHeadDim = Shape::kHeadDim;
    static constexpr int kColumns = Cfg::kQueryColumns;
    static constexpr bool kRotate = true;
    static constexpr bool kInt8 = Cfg::kInt8;
    using In = typename Cfg::In;
  };
  using Rows = RowsTransform<RowsCfg>;

  template <class Tiles>
  struct Storage : Tiles {
    alignas(1024) typename Cfg::In input[Shape::kConsumers][Shape::kRows * Shape::kHeadDim];  // zeros where there is none
  };
  using Shared = Storage<FlashStorage<Cfg>>;

  const QueryInput& source;
  unsigned parity = 0;  // of the rounds

  __device__ __forceinline__ explicit InputQueries(const QueryInput& source) : source(source) {}

  __device__ __forceinline__ void begin() const { ptx::prefetch_map(source.map); }

  __device__ __forceinline__ void fetch(Shared& shared, const Work<Cfg>& work) {
    for (int w = 0; w < Shape::kConsumers; ++w) {
      shared.q_empty[w].wait(parity ^ 1);
      shared.q_full[w].arrive_expect(sizeof(shared.input[w]));
      ptx::tma_load_4d(shared.input[w], source.map, shared.q_full[w], 0, work.first_row + w * Shape::kRows,
                       work.head % source.heads, work.head / source.heads);
    }
    parity ^= 1;
    ptx::wait_for_grid_before();  // what is fetched next are codes of K and V
  }

  // The four warps of a computing warpgroup wait for each other.
  __device__ __forceinline__ static void meet(int warpgroup) { ptx::barrier_sync(8 + warpgroup, 128); }

  __device__ __forceinline__ float prepare(const FlashParams&, Shared& shared, int warpgroup, int, int) {
    const int within = threadIdx.x / 32 % 4 * kQueryBlock + Rows::row_of_warp(), row[2] = {within, within + 8};
    const auto load = [&](int r, int column) {
      return *reinterpret_cast<const typename Rows::Loaded*>(shared.input[warpgroup] + row[r] * Shape::kHeadDim + column);
    };
    const Rows rows;
    typename Rows::Values x;
    shared.q_full[warpgroup].wait(parity);
    parity ^= 1;
    rows.transform(load, x);
    __syncwarp();
    if (threadIdx.x % 32 == 0) shared.q_empty[warpgroup].arrive();
    const float scale = Rows::scale_for(over_warp(Rows::largest(x)));
    meet(warpgroup);  // all have read the codes before
    rows.cast(x, scale, [&](int r, int column, const typename Rows::Codes& codes) {
      const int byte = row[r] * Shape::kDimPanel + column % Shape::kDimPanel;
      constexpr int kChunks = Shape::kDimPanel / 16;  // of a row, which the swizzle exchanges
      unsigned char* panel = shared.q[warpgroup][column / Shape::kDimPanel];
      *reinterpret_cast<typename Rows::Codes*>(panel + (byte ^ byte / 128 % kChunks * 16)) = codes;
    });
    ptx::fence_proxy_async();
    ptx::wait_for_grid_before();  // what follows reads scales of K and V
    return __shfl_sync(0xffffffffu, scale, 0);  // known to be uniform: saves a register
  }

  __device__ __forceinline__ void wait(Shared&, int warpgroup) const { meet(warpgroup); }
  __device__ __forceinline__ void release(Shared&, int) const {}
};

// Grid, block and dynamic shared memory: as for attention_hopper.
template <class Cfg>
__device__ __forceinline__ void attention_hopper_input(const FlashParams& p, const QueryInput& q,
                                                       const ptx::TensorMap& k_map, const ptx::TensorMap& v_map) {
  attention_hopper<Cfg, InputQueries<Cfg>>(p, q, k_map, v_map);
}

}  // namespace greenfast

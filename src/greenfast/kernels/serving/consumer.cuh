// The main loop of a consumer warpgroup over tiles of keys, for its 64 rows.
#pragma once

#include <math_constants.h>

#include "attention/sm90/traits.cuh"
#include "ptx/barrier.cuh"
#include "ptx/griddepcontrol.cuh"
#include "ptx/wgmma.cuh"
#include "serving/output.cuh"
#include "serving/quantize_q.cuh"
#include "serving/softmax.cuh"
#include "serving/v_stage.cuh"

namespace greenfast::serving {

// The wgmma descriptor of a stage. Computed once per tile, so that each wgmma only adds a constant.
template <unsigned kStageBytes, class Operand>
__device__ __forceinline__ Operand stage_of(Operand tiles, int stage) {
  tiles.low += stage * (kStageBytes / 16);
  return tiles;
}

// Run by the 128 threads of a consumer warpgroup. O has the register layout of the scores (see Softmax). The member
// order determines register allocation.
template <class T>
struct Consumer : Output<T> {
  using Base = Output<T>;
  using Base::flush_chunk, Base::signal_split_done, Base::write_partial, Base::combine_splits, Base::store;
  using Base::has_totals, Base::warpgroup_n, Base::reg_totals, Base::kOut, Base::o, Base::warpgroup_m, Base::stats;
  using Base::kThreads, Base::p, Base::rows, Base::shared;
  using Base::out_row, Base::partial, Base::partial_rows, Base::v_scale_of;
  using typename Base::RowFinalizer;
  static constexpr int kScores = Softmax<T>::kScores, kSteps = Softmax<T>::kSteps;

  const ptx::Operand<T::kPanel> q_operand, k_operands;
  const VOperand<T> v_operands;
  Ring<T::kStages> k_ring, v_ring;
  Ring<T::kScaleStages> scales_ring;
  unsigned q_parity = 0;

  Softmax<T> softmax;                              // of the current chunk
  int n_block_unmasked_min, n_block_unmasked_max;  // tiles without a mask

  __device__ __forceinline__ Consumer(const AttentionParams& p, Storage<T>& shared, int warpgroup)
      : Base{{p, shared, shared.rows[warpgroup / T::kWarpgroupsN]},
             shared.stats[warpgroup],
             warpgroup / T::kWarpgroupsN,
             warpgroup % T::kWarpgroupsN},
        q_operand(shared.q[warpgroup_m]),
        k_operands(shared.k),
        v_operands(shared.v[0][0] + warpgroup_n * T::kColumns * 16) {}

  __device__ __forceinline__ static void arrive(ptx::Mbarrier& barrier) {
    if (threadIdx.x % 32 == 0) barrier.arrive();
  }
  __device__ __forceinline__ void sync_rows() const { ptx::barrier_sync(Barrier::kRows + warpgroup_m, T::kRowThreads); }

  // Waits until the producer has published the next work item.
  __device__ __forceinline__ void wait_work() {
    shared.q_full.wait(q_parity);
    q_parity ^= 1;
    if constexpr (T::kPrefetchQ) prefetch_q(p, shared, warpgroup_m);
  }

  // Loads the next work item: key ranges of its rows, and Q, quantized. Returns false if there is none.
  __device__ __forceinline__ bool load_work() {
    sync_rows();  // all warps have finished the previous work item
    if constexpr (!T::kPrefetchQ) wait_work();
    const Work work = shared.next;
    if (work.chunks == 0) return false;
    if (row_thread<T>() == 0) {
      rows.work = work;
      if constexpr (T::kPrefetchScales) rows.v_scale = shared.next_scales[1];
    }
    const RowTile& tile = work.tile;
    const int group = p.batch.group, first = tile.first_row + warpgroup_m * 64, stop = tile.q_len * group;
    // Rows after the last one copy its key range. They are not written.
    const auto token_of = [&](int row) { return p.batch.token(min(first + row, stop - 1)); };
    float scale = p.softmax_scale;
    const auto head_scale = [&](const float* scales, const int (&strides)[2]) {
      return scales[static_cast<long long>(tile.sequence) * strides[0] + work.head * strides[1]];
    };
    if constexpr (T::kPrefetchScales) {
      scale *= shared.next_scales[0];
    } else if constexpr (!T::kTokenScales) {
      scale *= head_scale(p.k_scale, p.k_scale_strides);
    }
    if constexpr (T::kQuantizedQ) scale *= head_scale(p.q_scale, p.q_scale_strides);
    scale = T::kSoftcap ? scale / p.softcap : scale * kLog2E;
    // The scale must be positive so that the row maximum is too: a negative scale is replaced by its absolute value and
    // -Q.
    const unsigned signs = scale < 0.0f ? 0x80808080u : 0u;
    scale = fabsf(scale);
    if (row_thread<T>() < 64) {
      rows.begin[row_thread<T>()] = p.batch.key_begin(token_of(row_thread<T>()), tile.q_len, tile.kv_len);
      rows.end[row_thread<T>()] = p.batch.key_end(token_of(row_thread<T>()), tile.q_len, tile.kv_len);
    } else if (row_thread<T>() == 64) {
      rows.unmasked_begin = p.batch.key_begin(token_of(63), tile.q_len, tile.kv_len);
      rows.unmasked_end = p.batch.key_end(token_of(0), tile.q_len, tile.kv_len);
    }
    quantize_q(p, shared, rows, warpgroup_m, work, scale, signs);
    ptx::fence_proxy_async();
    sync_rows();
    if (row_thread<T>() == 0) shared.q_empty.arrive();
    return true;
  }

  template <int kCount>
  __device__ __forceinline__ void start_qk(float (&s)[kCount]) {
    const auto k_tile = stage_of<sizeof(shared.k[0])>(k_operands, k_ring.stage);
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < T::kHeadDim / 32; ++i) {
      const int panel = i * 32 / T::kPanel, panel_offset = i * 32 % T::kPanel;
      const unsigned long long q = q_operand.at(panel * sizeof(shared.q[0][0]) + panel_offset);
      const unsigned long long k = k_tile.at(panel * sizeof(shared.k[0][0]) + panel_offset);
      i == 0 ? ptx::wgmma_set(s, q, k) : ptx::wgmma_add(s, q, k);
    }
    ptx::wgmma_commit();
  }

  template <int kCount>
  __device__ __forceinline__ void start_pv(const unsigned (&p_frag)[kCount][4]) {
    const auto v_tile = stage_of<sizeof(shared.v[0])>(v_operands, v_ring.stage);
    ptx::wgmma_fence();
#pragma unroll
    for (int t = 0; t < kCount; ++t) ptx::wgmma_add(o, p_frag[t], v_tile.at(2 * t * T::kGroupBytes));
    ptx::wgmma_commit();
  }

  // One tile with kOverlap: its S = Q K^T, then its softmax to P while P V of the previous tile runs. The wait for V
  // comes after the start of S: with one stage V arrives later than K. kMasked: the tile may have a mask (tested at run
  // time with kRuntimeMask). kFirst: first tile of the work item. kNew: first tile of a chunk. kHalf: only the first
  // half of its keys is unmasked.
  template <bool kMasked, bool kFirst, bool kNew, bool kHalf = false>
  __device__ __forceinline__ void overlapped_step(int tile, unsigned (&p_frag)[kSteps][4]) {
    float s[kHalf ? kScores / 2 : kScores], rescale[2];
    const int stage = k_ring.stage;
    shared.k_full[stage].wait(k_ring.parity);
    bool v_waited = true;
    if constexpr (!kFirst) v_waited = prepare_v(tile - 1) || (T::kProducerZeroFills && v_ready());
    warp_scheduler_barrier_sync();
    start_qk(s);
    if constexpr (kFirst || T::kStages == 1) warp_scheduler_barrier_arrive();  // S of the other warpgroup needs no V
    if constexpr (!kFirst) {
      if (!v_waited) wait_v();  // without this condition the compiler spills and serializes wgmma (C7511)
      start_pv(p_frag);
      if constexpr (T::kStages > 1) warp_scheduler_barrier_arrive();
    }
    ptx::wgmma_wait<kFirst ? 0 : 1>();
    ptx::pin(s);
    arrive(shared.k_empty[stage]);
    const KeyScales* const key_scales = shared.key_scales + scales_ring.stage;
    if constexpr (T::kTokenScales) {
      shared.scales_full[scales_ring.stage].wait(scales_ring.parity);
      scales_ring.advance();
    }
    k_ring.advance();
    if constexpr (!kFirst && kNew) {
      softmax.keep(stats);
      softmax.start();
    }
    const auto end_output = [&] {
      ptx::wgmma_wait<0>();
      ptx::pin(o);
      release_v();
    };
    softmax.template online_softmax<kMasked>(
        s, p, rows, key_scales, tile * kBlockN, rescale,
        [&](float (&factor)[2]) {
          if constexpr (!kFirst && T::kStages == 1) {
            // From here on V's stage can be refilled. The compiler waits for wgmma before any exp2, but moves up to 200
            // instructions between that wait and the arrival, unless exp2 depends on a load that is issued after the
            // arrival.
            end_output();
            if constexpr (!T::kScaledScores) {
              for (int r = 0; r < 2; ++r) factor[r] = load_ordered(&rows.scale_log2[thread_row() + 8 * r]);
            }
          }
        },
        has_mask(tile));
    if constexpr (!kFirst && T::kStages > 1) end_output();
    // Only now: P V has read p_frag.
    if constexpr (kHalf) {
      unsigned half[kSteps / 2][4];
      softmax.pack(s, half);
#pragma unroll
      for (int t = 0; t < kSteps; ++t) {
#pragma unroll
        for (int i = 0; i < 4; ++i) p_frag[t][i] = t < kSteps / 2 ? half[t % (kSteps / 2)][i] : 0;
      }
    } else {
      softmax.pack(s, p_frag);
    }
    if constexpr (!kFirst) {
      if constexpr (kNew) {
        flush_chunk<false>((tile - 1) / (kChunk / kBlockN));
      } else if (__any_sync(0xffffffffu, rescale[0] != 1.0f || rescale[1] != 1.0f)) {
#pragma unroll
        for (int i = 0; i < kOut; ++i) o[i] *= rescale[i / 2 % 2];
      }
    }
  }

  // One tile without kOverlap. A turn of the ping-pong is P V of a tile and S of the next. This needs fewer registers,
  // so more warpgroups are resident and hide each other's latency. kHalf: only the first half of the tile's keys is
  // unmasked, as in the last tile of half of all causal work items.
  template <bool kMasked, bool kHalf>
  __device__ __forceinline__ void step(int tile) {
    float s[kHalf ? kScores / 2 : kScores], rescale[2];
    unsigned p_frag[kHalf ? kSteps / 2 : kSteps][4];
    const int stage = k_ring.stage;
    shared.k_full[stage].wait(k_ring.parity);
    start_qk(s);
    warp_scheduler_barrier_arrive();
    if constexpr (T::kTokenScales) shared.scales_full[stage].wait(k_ring.parity);
    ptx::wgmma_wait<0>();
    ptx::pin(s);
    arrive(shared.k_empty[stage]);
    softmax.template online_softmax<kMasked>(
        s, p, rows, shared.key_scales + stage, tile * kBlockN, rescale, [](float (&)[2]) {}, has_mask(tile));
    softmax.pack(s, p_frag);
    if (__any_sync(0xffffffffu, rescale[0] != 1.0f || rescale[1] != 1.0f)) {
#pragma unroll
      for (int i = 0; i < kOut; ++i) o[i] *= rescale[i / 2 % 2];
    }
    v_ring = k_ring;
    k_ring.advance();
    if (!kMasked || !prepare_v(tile)) wait_v();
    warp_scheduler_barrier_sync();
    start_pv(p_frag);
    ptx::wgmma_wait<0>();
    ptx::pin(o);
    arrive(shared.v_empty[v_ring.stage]);
  }

  __device__ __forceinline__ void wait_v() const { shared.v_full[v_ring.stage].wait(v_ring.parity); }
  __device__ __forceinline__ bool v_ready() const { return shared.v_full[v_ring.stage].is_over(v_ring.parity); }
  // Transposes or zero-fills a tile of V if that is the consumers' task. Returns whether it did, and has then waited
  // for V. All consumers meet at a barrier inside, so no warpgroup may hold the ping-pong turn here.
  __device__ __forceinline__ bool prepare_v(int tile) {
    constexpr bool kTurns = T::kTransposeV && !T::kProducerTransposesV;
    const int begin = rows.work.tile.key_begin - tile * kBlockN, end = rows.work.tile.key_end - tile * kBlockN;
    const bool clears =
        !T::kProducerZeroFills && !is_unmasked(tile) && ((begin > 0 && begin < kBlockN) || (end > 0 && end < kBlockN));
    if (kTurns || clears) wait_v();
    if constexpr (kTurns) {
      transpose_stage<T, 4 * T::kConsumers>(shared.v[v_ring.stage][0], threadIdx.x / 32);
      ptx::barrier_sync(Barrier::kConsumers, kThreads);
    }
    if (clears) {
      unsigned char* const stage = shared.v[v_ring.stage][0];
      T::kRowMajorV && !T::kTransposeV
          ? zero_v_rows<T>(stage, begin, end)
          : zero_v_keys<T, 4 * T::kConsumers>(stage, threadIdx.x / 32, 0, kBlockN, begin, end);
      ptx::barrier_sync(Barrier::kConsumers, kThreads);
    }
    return kTurns || clears;
  }
  __device__ __forceinline__ void release_v() {
    if constexpr (T::kRowMajorV && !T::kTransposeV) {
      ptx::fence_proxy_async();  // order these reads before the TMA write that reuses the stage
      __syncwarp();
    }
    arrive(shared.v_empty[v_ring.stage]);
    v_ring.advance();
  }

  // With kPingPong, the warpgroups along M issue their wgmmas in turn. Without this order they run in lockstep and
  // compete for the tensor cores.
  __device__ __forceinline__ void warp_scheduler_barrier_sync() const {
    if constexpr (T::kPingPong) ptx::barrier_sync(Barrier::kWarpScheduler + warpgroup_m, 256);
  }
  __device__ __forceinline__ void warp_scheduler_barrier_arrive() const {
    if constexpr (T::kPingPong) {
      ptx::barrier_arrive(Barrier::kWarpScheduler + (warpgroup_m + 1 == T::kWarpgroupsM ? 0 : warpgroup_m + 1), 256);
    }
  }

  // Sets the range of tiles without a mask.
  __device__ __forceinline__ void find_unmasked() {
    const auto uniform = [](int x) {
      return __shfl_sync(0xffffffffu, x, 0);
    };  // uniform for the compiler: saves registers
    n_block_unmasked_min = uniform((rows.unmasked_begin + kBlockN - 1) / kBlockN);
    n_block_unmasked_max = uniform(rows.unmasked_end / kBlockN);
  }

  // All tiles of a work item, including P V of the last one.
  __device__ __forceinline__ void run_tiles(int tile, int stop) {
    const auto without_mask = [&](int tile) { return !T::kRuntimeMask && is_unmasked(tile); };
    const int last_half = (rows.work.tile.key_end - 1) % kBlockN < kBlockN / 2 ? rows.work.tile.key_end / kBlockN : -1;
    if constexpr (!T::kOverlap) {
      while (true) {
        warp_scheduler_barrier_sync();
        do {
          if (without_mask(tile)) {
            step<false, false>(tile);
          } else {
            tile == last_half ? step<true, true>(tile) : step<true, false>(tile);
          }
          ++tile;
        } while (tile % (kChunk / kBlockN) != 0 && tile < stop);
        warp_scheduler_barrier_arrive();
        softmax.keep(stats);
        if (tile >= stop) return;
        flush_chunk<false>((tile - 1) / (kChunk / kBlockN));
        softmax.start();
      }
    }
    unsigned p_frag[kSteps][4];
    without_mask(tile) ? overlapped_step<false, true, true>(tile, p_frag)
                       : overlapped_step<true, true, true>(tile, p_frag);
    for (++tile; tile < stop; ++tile) {
      if (tile % (kChunk / kBlockN) == 0) {
        without_mask(tile) ? overlapped_step<false, false, true>(tile, p_frag)
                           : overlapped_step<true, false, true>(tile, p_frag);
      } else {
        if (without_mask(tile)) {
          overlapped_step<false, false, false>(tile, p_frag);
        } else {
          T::kHalfTiles&& tile == last_half ? overlapped_step<true, false, false, T::kHalfTiles>(tile, p_frag)
                                            : overlapped_step<true, false, false>(tile, p_frag);
        }
      }
    }
    softmax.keep(stats);
    if (!prepare_v(stop - 1)) wait_v();
    warp_scheduler_barrier_sync();
    start_pv(p_frag);
    warp_scheduler_barrier_arrive();
    ptx::wgmma_wait<0>();
    ptx::pin(o);
    release_v();
  }
  // Whether to apply the mask, in code compiled with one.
  __device__ __forceinline__ bool has_mask(int tile) const { return !T::kRuntimeMask || !is_unmasked(tile); }
  __device__ __forceinline__ bool is_unmasked(int tile) const {
    return tile >= n_block_unmasked_min && tile < n_block_unmasked_max;
  }

  __device__ __forceinline__ void run() {
    if (warpgroup_m == T::kWarpgroupsM - 1) warp_scheduler_barrier_arrive();  // gives the first warpgroup its turn
    if constexpr (T::kPrefetchQ) wait_work();
    while (load_work()) {
      softmax.start();
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        stats.total_max[thread_row() + 8 * r] = -CUDART_INF_F;
        stats.total_sum[thread_row() + 8 * r] = 0.0f;
      }
#pragma unroll
      for (int i = 0; i < kOut; ++i) o[i] = 0.0f;
      has_totals = false;
#pragma unroll
      for (float& x : reg_totals) x = 0.0f;
      find_unmasked();
      const int first = __shfl_sync(0xffffffffu, rows.work.n_block_min(), 0);
      const int stop = __shfl_sync(0xffffffffu, rows.work.n_block_max(), 0);
      if (first < stop) {
        run_tiles(first, stop);
        flush_chunk<true>((stop - 1) / (kChunk / kBlockN));
      }
      if constexpr (T::kPrefetchQ) wait_work();
      __syncwarp();
      if (rows.work.covers_tile()) {
        store(rows.work);
      } else {
        if (rows.work.begin == 0) write_partial(p.slots, stats.total_max, stats.total_sum);
        signal_split_done(plan_of(p));
      }
    }
    if (warpgroup_m == 0) warp_scheduler_barrier_sync();  // consumes the last arrival
    ptx::launch_dependent_grids();
    combine_splits(plan_of(p));
  }
};

}  // namespace greenfast::serving

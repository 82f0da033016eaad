// Attention forward for Hopper: TMA loads, both products by wgmma on FP8 (Q K^T also int8), softmax and P in registers.
//
// A producer warp loads tiles; each of kConsumers warpgroups computes 64 query rows: the main loop over key tiles
// (mainloop.cuh), then the epilogue. With kPromoteAccum the sum over tiles is in fp32; the tensor cores' own
// accumulation keeps about 14 bits. Warp specialization, ping-pong and the overlap of P V with the next softmax
// (kOverlap) are as in FlashAttention-3 (Shah et al., 2024).
//
// V is transposed, (heads, head_dim, keys). Its keys are permuted so that the accumulators of S are the A operand of P
// V without shuffles: of each 16 keys 0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15.
#pragma once

#include "attention/epilogue.cuh"
#include "attention/sm90/load_kv.cuh"
#include "attention/sm90/load_q.cuh"
#include "attention/sm90/mainloop.cuh"

namespace greenfast {

// With kWindow: the key tiles of a warpgroup's rows, first .. stop - 1, a part of the work tile's. In this order: `begun`
// tiles (some row's keys begin there), `both` (some begin and some end), `unmasked`, `masked` (some row's keys end).
template <class Traits>
struct WindowTiles {
  int first, stop, begun, both, unmasked, masked;

  __device__ __forceinline__ WindowTiles(const FlashParams& p, const WorkTile<Traits>& work,
                                         const typename Traits::Mask& mask, int first_row, int q_len, int n_block_max,
                                         int n_block_unmasked) {
    if constexpr (Traits::kWindow) {
      constexpr int kBlockN = Traits::kBlockN;
      const int lowest = work.n_block_min(p);
      stop = max(lowest, n_block_max);
      first = min(stop, max(lowest, mask.template n_block_min<kBlockN>(first_row)));
      const int stop_row = min(first_row + Traits::kRows, q_len);
      const int begun_stop = min(stop, max(first, mask.template n_block_begun<kBlockN>(stop_row)));
      const int unmasked_stop = min(stop, max(begun_stop, n_block_unmasked));
      begun = min(begun_stop, max(first, n_block_unmasked)) - first;
      both = begun_stop - first - begun;
      unmasked = unmasked_stop - begun_stop;
      masked = stop - unmasked_stop;
    }
  }
};

// The non-finite rows of a thread, after a work tile of a schedule. find: looks for those that attend to non-finite keys.
template <class Traits, class Find>
__device__ __forceinline__ NonFiniteRows find_nonfinite(const Mainloop<Traits>& mainloop, Find find) {
  NonFiniteRows nonfinite = {};
  if (mainloop.nonfinite.found()) nonfinite = find();
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float row_factor = mainloop.scales.row_factor(r);
    nonfinite.scores[r] |= row_factor != row_factor && mainloop.softmax.base[r] != -CUDART_INF_F;
  }
  return nonfinite;
}

// Processes all work tiles of a block. Called by each consumer warpgroup.
template <class Traits, class Scheduler, class Storage, class QLoad>
__device__ __forceinline__ void consume(const FlashParams& p, Scheduler& scheduler, Storage& shared, QLoad& q_load,
                                        int warpgroup) {
  constexpr int kBlockN = Traits::kBlockN;
  Mainloop<Traits> mainloop(p, shared, warpgroup);
  if (warpgroup == Traits::kConsumers - 1)
    mainloop.warp_scheduler_barrier_arrive();  // gives the first warpgroup its turn
  for (int round = 0; scheduler.has(round); ++round) {
    const int index = scheduler.tile(round);
    if (index >= scheduler.tiles) continue;
    const WorkTile<Traits> work(p, index);
    const typename Traits::Sequence sequence{p, work.head};
    const int first_row = work.first_row + warpgroup * Traits::kRows;
    const typename Traits::Keys keys = sequence.key_rows();
    if constexpr (Traits::kListed) {
      TileList list(p, sequence.head, work.first_row);
      const int tiles = list.count, first_block = static_cast<int>(sequence.first_kv_block(keys));
      const bool has_rows = first_row < sequence.q_len();
      if (!has_rows) list.masked = list.count = 0;
      const int row = warpgroup * Traits::kRows + threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;
      float q_scale[ScoreScales<Traits>::kRowScales];
      q_load.prepare(p, shared, warpgroup, sequence, first_row, mainloop, q_scale);
      mainloop.start(sequence, keys, first_row, q_scale);
      q_load.wait(shared, warpgroup);
      mainloop.run_list(list, first_block, row);
      q_load.release(shared, warpgroup);
      const NonFiniteRowsFinder<Traits> finder{p, sequence, keys, first_row};
      const NonFiniteRows nonfinite = find_nonfinite(mainloop, [&] { return finder.find_in_list(list, row); });
      mainloop.skip(list.count, tiles);
      if (has_rows) {
        Epilogue<Traits>::store(mainloop, sequence.head, first_row, sequence.q_len(), keys.kv_head, nonfinite);
      }
    } else {
      const typename Traits::Mask mask{sequence};
      // Key tiles of this warpgroup's rows, and the unmasked ones among them. Lengths are read from p and not from the
      // sequence: otherwise the compiler reorders the epilogue.
      const int q_len = Traits::kScheduled ? sequence.q_len() : p.q_len;
      int n_block_max =
          first_row < q_len ? mask.template n_block_max<kBlockN>(min(first_row + Traits::kRows, q_len)) : 0;
      const int n_block_unmasked = min(n_block_max, mask.template n_block_unmasked<kBlockN>(first_row));
      const bool has_rows = first_row < q_len;
      const int row = first_row + threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;
      const WindowTiles<Traits> window(p, work, mask, first_row, q_len, n_block_max, n_block_unmasked);
      typename Traits::Mask::Limits limits;
      mask.start_limits(limits, row, (Traits::kWindow ? window.first : n_block_unmasked) * kBlockN);

      float q_scale[ScoreScales<Traits>::kRowScales];
      q_load.prepare(p, shared, warpgroup, sequence, first_row, mainloop, q_scale);
      mainloop.start(sequence, keys, first_row, q_scale);
      q_load.wait(shared, warpgroup);
      if constexpr (Traits::kWindow) {
        mainloop.skip(work.n_block_min(p), window.first);
        mainloop.scales.next_block += window.first * (kBlockN / kRowBlock);
        mainloop.run(window.begun, window.both, window.unmasked, window.masked, limits);
        n_block_max = window.stop;
      } else {
        mainloop.run(0, 0, n_block_unmasked, n_block_max - n_block_unmasked, limits);
      }
      q_load.release(shared, warpgroup);
      const NonFiniteRowsFinder<Traits> finder{p, sequence, keys, first_row};
      NonFiniteRows nonfinite;
      if constexpr (Traits::kScheduled) {
        nonfinite = find_nonfinite(mainloop, [&] { return finder.find(mainloop.scales); });
      } else {
        nonfinite = finder.find(mainloop.scales);
      }
      mainloop.skip(n_block_max, work.n_block_max);
      const int rows_before = Traits::kScheduled ? sequence.q_row(0) : 0;
      if (has_rows) {
        Epilogue<Traits>::store(mainloop, sequence.head, first_row + rows_before, q_len + rows_before, keys.kv_head,
                                nonfinite);
      }
    }
  }
  if (warpgroup == 0) mainloop.warp_scheduler_barrier_sync();  // consumes the last arrival
}

// The kernel body. QLoad: the loader of Q (load_q.cuh). q: tensor map of the quantized Q, or the Source of QLoad. Grid:
// at most one block per multiprocessor at a time. Block: 128 threads per consumer warpgroup and 128 for the producer.
// Dynamic shared memory: sizeof(Storage), and up to 1024 bytes for alignment.
template <class Cfg, template <class> class QLoad = QLoadQuantized>
__device__ __forceinline__ void attention_sm90(const FlashParams& p, const typename QLoad<FlashTraits<Cfg>>::Source& q,
                                               const ptx::TensorMap& k_map, const ptx::TensorMap& v_map) {
  using Traits = FlashTraits<Cfg>;
  using Storage = typename QLoad<Traits>::template Storage<FlashStorage<Traits>>;
  extern __shared__ __align__(1024) unsigned char smem[];
  Storage& shared = *reinterpret_cast<Storage*>(smem);
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);  // makes it uniform for the compiler
  if constexpr (Traits::kScheduled) ptx::griddepcontrol_wait();          // for the schedule, an earlier kernel's output
  const StaticScheduler scheduler{Traits::kScheduled ? 0 : WorkTile<Traits>::count(p)};
  static_assert(sizeof(Storage) == Cfg::kSmemBytes, "the plan of shared memory in Python differs");
  if (Traits::kInt8 && threadIdx.x < 4) shared.score_start[threadIdx.x] = RawScore<true>::kStart;
  if (threadIdx.x == 0) {
    constexpr int kWarps = 4;
    for (int w = 0; w < Traits::kConsumers; ++w) {
      shared.q_full[w].init(1);
      shared.q_empty[w].init(kWarps);
    }
    for (int s = 0; s < Traits::kStages; ++s) {
      shared.k_full[s].init(1);
      shared.v_full[s].init(1);
      shared.k_empty[s].init(kWarps * Traits::kConsumers);
      shared.v_empty[s].init(kWarps * Traits::kConsumers);
    }
    if constexpr (Traits::kScheduled) {
      for (int s = 0; s < 2; ++s) {
        shared.next_full[s].init(1);
        shared.next_empty[s].init(kWarps * Traits::kConsumers);
      }
    }
    ptx::fence_mbarrier_init();
  }
  if constexpr (Traits::kRowSumByMma) {  // rows of ones after V^T
    constexpr int kEnd = Traits::kHeadDim * Traits::kKeyPanel, kWords = Traits::kRowSumColumns * Traits::kKeyPanel / 4;
    for (int i = threadIdx.x; i < Traits::kStages * Traits::kKeyPanels * kWords; i += Traits::kThreads) {
      unsigned char* panel = shared.v[0][0] + i / kWords * sizeof(shared.v[0][0]);
      reinterpret_cast<unsigned*>(panel + kEnd)[i % kWords] = 0x38383838;  // 1 in E4M3
    }
    ptx::fence_proxy_async();
  }
  __syncthreads();
  QLoad<Traits> q_load(q);
  if (warpgroup == Traits::kConsumers) {
    ptx::warpgroup_reg_dealloc<Traits::kProducerRegisters>();
    if (threadIdx.x % 128 == 0) {
      q_load.begin();
      ptx::prefetch_map(k_map);
      ptx::prefetch_map(v_map);
      if constexpr (Traits::kScheduled) {
        DynamicScheduler<Traits, Storage, true> taking(p, shared);
        produce<Traits>(p, taking, shared, q_load, k_map, v_map);
      } else {
        produce<Traits>(p, scheduler, shared, q_load, k_map, v_map);
      }
    }
  } else {
    ptx::warpgroup_reg_alloc<Traits::kConsumerRegisters>();
    if constexpr (Traits::kScheduled) {
      DynamicScheduler<Traits, Storage, false> receiving(p, shared);
      consume<Traits>(p, receiving, shared, q_load, warpgroup);
    } else {
      consume<Traits>(p, scheduler, shared, q_load, warpgroup);
    }
  }
}

}  // namespace greenfast

// Attention forward for Hopper: tiles by TMA, both products by wgmma on E4M3, softmax and P in registers.
//
// A producer warp fetches, and each of kConsumers warpgroups computes 64 query rows: the main loop over tiles of keys
// (mainloop.cuh), then the epilogue. The sums over tiles are in fp32 (kTwoLevels), where the tensor cores' own keep
// about 14 bits. The division into a producer and consumers in ping-pong, and P V during the next softmax (kOverlap),
// are from FlashAttention-3 (Shah et al., 2024).
//
// V comes transposed, (heads, head_dim, keys), its keys in the order in which the accumulators of S are the A operand
// of P V as they lie: of each 16 keys 0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15.
#pragma once

#include "attention/epilogue.cuh"
#include "attention/sm90/load_kv.cuh"
#include "attention/sm90/load_q.cuh"
#include "attention/sm90/mainloop.cuh"

namespace greenfast {

// All work tiles of a block, by a consumer warpgroup.
template <class Traits, class Storage, class Queries>
__device__ __forceinline__ void consume(const FlashParams& p, const StaticScheduler& scheduler, Storage& shared,
                                        Queries& queries, int warpgroup) {
  constexpr int kBlockN = Traits::kBlockN;
  Mainloop<Traits> mainloop(p, shared, warpgroup);
  if (warpgroup == Traits::kConsumers - 1) mainloop.pass_turn();  // the first warpgroup begins
  for (int round = 0; scheduler.has(round); ++round) {
    const int index = scheduler.tile(round);
    if (index >= scheduler.tiles) continue;
    const WorkTile<Traits> work(p, index);
    const Sequence sequence{p, work.head};
    const typename Traits::Mask mask{sequence};
    const int first_row = work.first_row + warpgroup * Traits::kRows;
    const KeyRows keys = sequence.key_rows();
    // Tiles that any of this warpgroup's rows attend to, and those that all of them attend to whole. Lengths are read
    // from p and not from the sequence: else the compiler orders the epilogue's instructions otherwise.
    const int stop = first_row < p.q_len
                         ? mask.template stop_tile<kBlockN>(min(first_row + Traits::kRows, p.q_len))
                         : Traits::Mask::first_tile;
    const int whole = min(stop, mask.template whole_tiles<kBlockN>(first_row));
    const bool any = first_row < p.q_len;
    const int row = first_row + threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;
    int end[2];  // of the keys of this thread's rows, counted from the first tile that is not whole
    for (int r = 0; r < 2; ++r) end[r] = mask.row_end(row + 8 * r) - whole * kBlockN;

    float q_scale[ScoreScales<Traits>::kRowScales];
    queries.prepare(p, shared, warpgroup, sequence, first_row, mainloop, q_scale);
    mainloop.start(sequence, keys, q_scale);
    queries.wait(shared, warpgroup);
    mainloop.run(whole, stop - whole, end);
    queries.release(shared, warpgroup);
    const UnknownRows unknown =
        UnknownRowsFinder<Traits>{p, sequence, keys, first_row}.find(mainloop.scales);
    mainloop.skip(stop, work.stop_tile);
    if (any) Epilogue<Traits>::store(mainloop, sequence.head, first_row, keys.kv_head, unknown);
  }
  if (warpgroup == 0) mainloop.take_turn();  // no turn stays untaken
}

// Queries and Values: the loaders of Q (load_q.cuh) and of V (load_kv.cuh). q: a tensor map of Q's codes, or what else
// Queries reads. Grid: at most one block per multiprocessor. Block: 128 threads per consumer and 128 for the producer.
// Dynamic shared memory: sizeof(Storage) and up to 1024 bytes of alignment.
template <class Cfg, template <class> class Queries = CodedQueries, template <class> class Values = TransposedValues>
__device__ __forceinline__ void attention_sm90(const FlashParams& p,
                                               const typename Queries<FlashTraits<Cfg>>::Source& q,
                                               const ptx::TensorMap& k_map, const ptx::TensorMap& v_map) {
  using Traits = FlashTraits<Cfg>;
  using Storage = typename Queries<Traits>::template Storage<typename Values<Traits>::Storage>;
  extern __shared__ __align__(1024) unsigned char smem[];
  Storage& shared = *reinterpret_cast<Storage*>(smem);
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);  // known to be uniform
  const StaticScheduler scheduler(p, Traits::kBlockM);
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
      shared.v_full[s].init(Values<Traits>::kArrivals);
      shared.k_empty[s].init(kWarps * Traits::kConsumers);
      shared.v_empty[s].init(kWarps * Traits::kConsumers);
    }
    Values<Traits>::init(shared);
    ptx::fence_mbarrier_init();
  }
  if constexpr (Traits::kSumsByProduct) {  // rows of ones behind V
    constexpr int kEnd = Traits::kHeadDim * Traits::kKeyPanel, kWords = Traits::kSumColumns * Traits::kKeyPanel / 4;
    for (int i = threadIdx.x; i < Traits::kStages * Traits::kKeyPanels * kWords; i += Traits::kThreads) {
      unsigned char* panel = shared.v[0][0] + i / kWords * sizeof(shared.v[0][0]);
      reinterpret_cast<unsigned*>(panel + kEnd)[i % kWords] = 0x38383838;  // 1 in E4M3
    }
    ptx::fence_proxy_async();
  }
  __syncthreads();
  Queries<Traits> queries(q);
  if (warpgroup == Traits::kConsumers) {
    ptx::warpgroup_reg_dealloc<Traits::kProducerRegisters>();
    const int warp = threadIdx.x / 32 % 4;
    Values<Traits> values;
    if (warp > 0) {
      values.transpose(p, scheduler, shared, warp - 1);
    } else if (threadIdx.x % 32 == 0) {
      queries.begin();
      ptx::prefetch_map(k_map);
      ptx::prefetch_map(v_map);
      produce<Traits>(p, scheduler, shared, queries, values, k_map, v_map);
    }
  } else {
    ptx::warpgroup_reg_alloc<Traits::kConsumerRegisters>();
    consume<Traits>(p, scheduler, shared, queries, warpgroup);
  }
}

}  // namespace greenfast

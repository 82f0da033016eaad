// Stage 3B with persistent blocks: as many as are resident; each computes every gridDim.x-th 32 query rows of a head.
// Why: where blocks are many times the multiprocessors, every block pays its launch and a latency of L2.
// Measured: SLOWER, 0.950x over Stage 3B at batch 16 on an H100 (evidence/h100/fp8_sdpa-e4m3-stage3b_persistent).
//
// Unlike in stage3b.cuh, the first tiles of K and V and the Q of the next work item are loaded while the partial
// results are combined. So the stages of these tiles must not overlap with the partial results.
#pragma once

#include "stage3b.cuh"

namespace greenfast {

template <class Cfg>
struct PersistentStorage {
  using Base = RegistersStorage<Cfg>;
  typename Base::Stage first[RegistersShape<Cfg>::kKeyGroups];
  union {
    typename Base::Stage second[RegistersShape<Cfg>::kKeyGroups];
    typename Base::Partial partial;
  };
};

// Grid: at most one block per work, of ceil(seq_len / 32) x heads. Block: 256 threads. Dynamic shared memory:
// Cfg::kSmemBytes.
template <class Cfg>
__device__ __forceinline__ void attention_persistent(const LadderParams& params, int heads) {
  static_assert(Cfg::kHeadDim == 64 || Cfg::kHeadDim == 128, "head_dim is 64 or 128");
  static_assert(Cfg::kStages == 2, "two stages");

  using Shape = RegistersShape<Cfg>;
  using Storage = PersistentStorage<Cfg>;
  using Phase = RegistersPhase;
  constexpr int kSecond = sizeof(Storage::first);  // byte offset of the second stages
  static_assert((kSecond & (kSecond - 1)) == 0, "the places in both stages differ by one bit");
  static_assert(sizeof(Storage) == Cfg::kSmemBytes, "the plan of shared memory in Python differs from the map");

  extern __shared__ __align__(128) unsigned char smem[];
  Storage& shared = *reinterpret_cast<Storage*>(smem);
  PhaseClock<Cfg::kPhaseClocks, Phase::kCount> clock(params.phase_cycles);

  const RegistersThread<Cfg> thread;
  const int row_blocks = (params.seq_len + Shape::kBlockM - 1) / Shape::kBlockM;
  const int works = row_blocks * heads;
  const auto work_of = [&](int i) {
    return RegistersWork<Cfg>(params, i / row_blocks, i % row_blocks * Shape::kBlockM);
  };
  int next = blockIdx.x;
  RegistersWork<Cfg> next_work = work_of(next);
  GroupCopies<Cfg> copies(params, next_work.head_offset, thread.group, shared.first[thread.group]);

  // Loads what a work item needs before its first product, without waiting. At head dim 128 Q would need more registers
  // than are free before O is written.
  constexpr bool kQAhead = Cfg::kHeadDim == 64;
  RegistersQueries<Cfg> queries;
  const auto begin = [&] {
    copies.fetch(0);
    next_work.read_scales(params);
    if constexpr (kQAhead) queries.load(params, next_work, thread);
  };
  begin();
#pragma unroll 1
  while (true) {
    const RegistersWork<Cfg> work = next_work;
    copies.fetch(kSecond);
    if constexpr (!kQAhead) queries.load(params, work, thread);

    int stage = 0;  // byte offset of the current stage
    const auto ready = [&](int tile, int group, int& k_at, int& v_at) {
      copies.wait(tile, group);
      if (tile > group) {
        copies.fetch(stage);
        stage ^= kSecond;
        k_at ^= kSecond;
        v_at ^= kSecond;
      }
    };
    next += gridDim.x;
    const auto finish = [&] {  // frees all stages: zero-fills beyond the last tile may be in flight
      ptx::cp_async_wait<0>();
      __syncthreads();
      if (next < works) {
        next_work = work_of(next);
        copies.begin(params, next_work.head_offset, thread.group);
        begin();
      }
    };
    attend<Cfg, false>(
        params, work, thread, queries, smem, thread.group * sizeof(shared.first[0]), shared.partial, clock, ready,
        [](int&, int&) {}, finish, [] { __syncthreads(); });
    if (next >= works) break;
    __syncthreads();  // until the partial results have been read
  }
  clock.write();
}

}  // namespace greenfast

// Stage 3B of the attention ladder: full fusion. Unlike staged.cuh, scores and P stay in registers.
//
// A block of eight warps computes 32 query rows of one head. Two warps, with 16 rows each, share a key group (every
// fourth tile of keys). The four groups combine their partial results in shared memory at the end. K and V are copied
// by cp.async in 8 bits and dequantized on the way to the operands of mma.m16n8k16. The head dim may be permuted in
// both products; the order here gives each thread whole vectors of 8-bit values. Online softmax (Milakov and
// Gimelshein, 2018) in base 2; the base of a row changes only if P would exceed 2^8.
#pragma once

#include "registers_steps.cuh"

namespace greenfast {

// Grid: (ceil(seq_len / 32), heads). Block: 256 threads. Dynamic shared memory: Cfg::kSmemBytes.
template <class Cfg>
__device__ __forceinline__ void attention_registers(const LadderParams& params) {
  static_assert(Cfg::kHeadDim == 64 || Cfg::kHeadDim == 128, "head_dim is 64 or 128");
  static_assert(Cfg::kStages == 2 || Cfg::kStages == 3, "two stages or three");

  using Shape = RegistersShape<Cfg>;
  using Storage = RegistersStorage<Cfg>;
  using Phase = RegistersPhase;
  constexpr int kStageBytes = sizeof(typename Storage::Stage);
  static_assert(sizeof(Storage) == Cfg::kSmemBytes, "the plan of shared memory in Python differs from the map");

  extern __shared__ __align__(128) unsigned char smem[];
  Storage& shared = *reinterpret_cast<Storage*>(smem);
  PhaseClock<Cfg::kPhaseClocks, Phase::kCount> clock(params.phase_cycles);

  const RegistersThread<Cfg> thread;
  RegistersWork<Cfg> work(params, blockIdx.y, blockIdx.x * Shape::kBlockM);
  GroupCopies<Cfg> copies(params, work.head_offset, thread.group, shared.stages[thread.group][0]);
#pragma unroll
  for (int i = 0; i < Cfg::kStages; ++i) copies.fetch(i * kStageBytes);
  work.read_scales(params);
  RegistersQueries<Cfg> queries;
  queries.load(params, work, thread);

  int stage = 0;  // byte offset of the current stage
  const auto ready = [&](int tile, int group, int& k_at, int& v_at) {
    copies.wait(tile, group);
    if (tile > group) {
      copies.fetch(stage);
      const int step = stage == (Cfg::kStages - 1) * kStageBytes ? -stage : kStageBytes;
      stage += step;
      k_at += step;
      v_at += step;
    }
  };
  const auto finish = [] {  // zero-fills beyond the last tile may be in flight
    ptx::cp_async_wait<0>();
    __syncthreads();
  };
  attend<Cfg, false>(
      params, work, thread, queries, smem, thread.group * sizeof(shared.stages[0]), shared.partial, clock, ready,
      [](int&, int&) {}, finish, [] { __syncthreads(); });
  clock.write();
}

}  // namespace greenfast

// Stage 3B with warp specialization: a ninth warp (the producer) copies K and V, eight consumer warps compute.
// Why: the copies take a warp 14 of its 240 instructions per tile, and a barrier of the two warps of a key group.
// Measured: SLOWER, 0.952x over Stage 3B at S=512 on an H100 (evidence/h100/fp8_sdpa-e4m3-stage3b_specialized).
//
// The producer runs ahead by the number of stages. It uses mbarriers: cp.async arrives when its bytes have landed, so
// no thread waits on behalf of the consumers. Named barriers would not suffice: four key groups with two stages need 16
// of them beside the block's own.
#pragma once

#include "ptx/barrier.cuh"
#include "ptx/cp_async_mbarrier.cuh"
#include "stage3b.cuh"

namespace greenfast {

struct SpecializedBarrier {
  enum {
    kConsumers,  // consumer warps
    kBlock       // all warps
  };
};

template <class Cfg>
struct SpecializedStorage {
  using Shape = RegistersShape<Cfg>;
  RegistersStorage<Cfg> codes;
  static constexpr int kAllStages = Shape::kKeyGroups * Cfg::kStages;
  alignas(128) ptx::Mbarrier full[kAllStages];  // the copies of the producer's 32 threads have landed
  ptx::Mbarrier empty[kAllStages];              // the group's two warps have the tile in registers
};

// Grid: (ceil(seq_len / 32), heads). Block: 288 threads. Dynamic shared memory: Cfg::kSmemBytes.
template <class Cfg>
__device__ __forceinline__ void attention_specialized(const LadderParams& params) {
  static_assert(Cfg::kHeadDim == 64 || Cfg::kHeadDim == 128, "head_dim is 64 or 128");
  static_assert(Cfg::kStages == 2, "two stages");

  using Shape = RegistersShape<Cfg>;
  using Storage = SpecializedStorage<Cfg>;
  using Tile = typename RegistersStorage<Cfg>::Tile;
  using Phase = RegistersPhase;
  constexpr int kHeadDim = Shape::kHeadDim, kKeys = Shape::kKeys, kGroups = Shape::kKeyGroups;
  constexpr int kThreads = Shape::kThreads + 32;
  constexpr int kStageBytes = sizeof(typename RegistersStorage<Cfg>::Stage);
  static_assert(sizeof(Storage) == Cfg::kSmemBytes, "the plan of shared memory in Python differs from the map");

  extern __shared__ __align__(128) unsigned char smem[];
  Storage& shared = *reinterpret_cast<Storage*>(smem);
  PhaseClock<Cfg::kPhaseClocks, Phase::kCount> clock(params.phase_cycles);

  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  RegistersWork<Cfg> work(params, blockIdx.y, blockIdx.x * Shape::kBlockM);

  if (warp == Shape::kWarps) {
    if (lane == 0) {
#pragma unroll
      for (int i = 0; i < Storage::kAllStages; ++i) {
        shared.full[i].init(32);
        shared.empty[i].init(Shape::kRowGroups);
      }
    }
    __syncwarp();
    // Each lane copies one chunk of every kRowsPerCopy-th row. Rows beyond the end are zero-filled without a read.
    constexpr int kRowsPerCopy = 32 / Tile::kChunksPerRow;
    const int copy_row = lane / Tile::kChunksPerRow, chunk = lane % Tile::kChunksPerRow;
    const size_t copy_offset = work.head_offset + static_cast<size_t>(copy_row) * kHeadDim + chunk * 16;
    const unsigned char* k_next = params.k + copy_offset;
    const unsigned char* v_next = params.v + copy_offset;
    int rows_left = params.seq_len - copy_row;
    const auto fetch = [&](int group, int stage) {  // copies the next tile
      unsigned char* const stage_bytes = shared.codes.stages[group][stage].k.bytes;
#pragma unroll
      for (int row = 0; row < kKeys; row += kRowsPerCopy) {
        const int bytes = row < rows_left ? 16 : 0;
        unsigned char* const dst = stage_bytes + Tile::chunk_offset(copy_row + row, chunk);
        ptx::cp_async_16(dst, k_next + row * kHeadDim, bytes);
        ptx::cp_async_16(dst + sizeof(Tile), v_next + row * kHeadDim, bytes);
      }
      ptx::cp_async_arrive(shared.full[group * Cfg::kStages + stage]);
      k_next += kKeys * kHeadDim;
      v_next += kKeys * kHeadDim;
      rows_left -= kKeys;
    };
    // Stages are empty at first: no wait. The consumers load Q meanwhile.
    const int first = min(work.tiles, Storage::kAllStages);
#pragma unroll 1
    for (int tile = 0; tile < first; ++tile) fetch(tile % kGroups, tile / kGroups);
    ptx::barrier_sync(SpecializedBarrier::kBlock, kThreads);
#pragma unroll 1
    for (int tile = first; tile < work.tiles; ++tile) {
      const int group = tile % kGroups, round = tile / kGroups, stage = round % Cfg::kStages;
      ptx::mbarrier_wait(shared.empty[group * Cfg::kStages + stage], (round / Cfg::kStages - 1) % 2);
      fetch(group, stage);
    }
    return;
  }

  const RegistersThread<Cfg> thread;
  work.read_scales(params);
  RegistersQueries<Cfg> queries;
  queries.load(params, work, thread);
  ptx::barrier_sync(SpecializedBarrier::kBlock, kThreads);  // the mbarriers are initialized

  // Offsets switch between the two stages by one bit.
  static_assert((kStageBytes & (kStageBytes - 1)) == 0, "stages of a power of two");
  int stage_index = 0;
  const auto ready = [&](int tile, int group, int&, int&) {
    const int round = tile / kGroups;
    stage_index = group * Cfg::kStages + round % Cfg::kStages;
    ptx::mbarrier_wait(shared.full[stage_index], round / Cfg::kStages % 2);
  };
  const auto release = [&](int& k_at, int& v_at) {
    __syncwarp();
    if (thread.lane == 0) shared.empty[stage_index].arrive();
    k_at ^= kStageBytes;
    v_at ^= kStageBytes;
  };
  const auto sync_consumers = [] { ptx::barrier_sync(SpecializedBarrier::kConsumers, Shape::kThreads); };
  attend<Cfg, kHeadDim == 64>(params, work, thread, queries, smem, thread.group * Cfg::kStages * kStageBytes,
                              shared.codes.partial, clock, ready, release, sync_consumers, sync_consumers);
  clock.write();
}

}  // namespace greenfast

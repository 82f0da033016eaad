// Stage 3B with warp specialization: a ninth warp copies the codes of K and V, eight multiply.
//
// The copying warp runs ahead by as many tiles as there are stages. The barriers are mbarriers: cp.async arrives at one
// when its bytes have landed, so that nobody has to wait on the consumers' behalf, and four groups of keys with two
// stages each would need 16 named barriers beside the block's own, of 16 in all.
#pragma once

#include "ptx/cp_async_mbarrier.cuh"
#include "registers_steps.cuh"

namespace greenfast {

template <class Cfg>
struct SpecializedStorage {
  using Shape = RegistersShape<Cfg>;
  RegistersStorage<Cfg> codes;
  static constexpr int kAllStages = Shape::kKeyGroups * Cfg::kStages;
  alignas(128) ptx::Mbarrier full[kAllStages];  // the bytes of the 32 copying threads have landed
  ptx::Mbarrier empty[kAllStages];              // the group's two warps have the codes in registers
};

struct SpecializedBarrier {
  enum { kConsumers, kBlock };  // named barriers: of the warps that multiply, and of all
};

// Grid: (ceil(seq_len / 32), heads). Block: 288 threads. Dynamic shared memory: Cfg::kSmemBytes.
template <class Cfg>
__device__ __forceinline__ void attention_specialized(const RegistersParams& params) {
  static_assert(Cfg::kHeadDim == 64 || Cfg::kHeadDim == 128, "head_dim is 64 or 128");
  static_assert(Cfg::kStages == 2, "two stages");

  using Shape = RegistersShape<Cfg>;
  using Rows = RegistersRows<Cfg>;
  using Storage = SpecializedStorage<Cfg>;
  using Tile = typename Rows::Tile;
  using Phase = RegistersPhase;
  constexpr int kHeadDim = Shape::kHeadDim, kKeys = Shape::kKeys, kGroups = Shape::kKeyGroups;
  constexpr int kThreads = Shape::kThreads + 32;
  constexpr int kStageBytes = sizeof(typename Rows::Storage::Stage);
  static_assert(sizeof(Storage) == Cfg::kSmemBytes, "the plan of shared memory in Python differs from the map");

  extern __shared__ __align__(128) unsigned char smem[];
  Storage& shared = *reinterpret_cast<Storage*>(smem);
  PhaseClock<Cfg::kPhaseClocks, Phase::kCount> clock(params.phase_cycles);

  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int head = blockIdx.y;
  const int first_row = blockIdx.x * Shape::kBlockM;
  const size_t head_offset = static_cast<size_t>(head) * params.seq_len * kHeadDim;
  const int tiles = (params.seq_len + kKeys - 1) / kKeys;

  if (warp == Shape::kWarps) {
    if (lane == 0) {
#pragma unroll
      for (int i = 0; i < Storage::kAllStages; ++i) {
        shared.full[i].init(32);
        shared.empty[i].init(Shape::kRowGroups);
      }
    }
    __syncwarp();
    // Each lane copies one piece of every kRowsPerCopy-th row. Rows beyond the end become zero and are not read.
    constexpr int kRowsPerCopy = 32 / Tile::kPieces;
    const int copy_row = lane / Tile::kPieces, piece = lane % Tile::kPieces;
    const size_t copy_offset = head_offset + static_cast<size_t>(copy_row) * kHeadDim + piece * 16;
    const unsigned char* k_next = params.k + copy_offset;
    const unsigned char* v_next = params.v + copy_offset;
    int rows_left = params.seq_len - copy_row;
    const auto fetch = [&](int group, int stage) {  // the next tile
      unsigned char* const to = shared.codes.stages[group][stage].k.bytes;
#pragma unroll
      for (int row = 0; row < kKeys; row += kRowsPerCopy) {
        const int bytes = row < rows_left ? 16 : 0;
        unsigned char* const at = to + Tile::place(copy_row + row, piece);
        ptx::cp_async_16(at, k_next + row * kHeadDim, bytes);
        ptx::cp_async_16(at + sizeof(Tile), v_next + row * kHeadDim, bytes);
      }
      ptx::cp_async_arrive(shared.full[group * Cfg::kStages + stage]);
      k_next += kKeys * kHeadDim;
      v_next += kKeys * kHeadDim;
      rows_left -= kKeys;
    };
    // The stages are empty at first, and the consumers load Q meanwhile.
    const int first = min(tiles, Storage::kAllStages);
#pragma unroll 1
    for (int tile = 0; tile < first; ++tile) fetch(tile % kGroups, tile / kGroups);
    ptx::barrier_sync(SpecializedBarrier::kBlock, kThreads);
#pragma unroll 1
    for (int tile = first; tile < tiles; ++tile) {
      const int group = tile % kGroups, round = tile / kGroups, stage = round % Cfg::kStages;
      ptx::mbarrier_wait(shared.empty[group * Cfg::kStages + stage], (round / Cfg::kStages - 1) % 2);
      fetch(group, stage);
    }
    return;
  }

  const int g = lane / 4, t = lane % 4, group = warp / Shape::kRowGroups;
  const float log2_e = 1.4426950408889634f;
  const float scale_log2 = params.q_scale[head] * params.k_scale[head] * params.softmax_scale * log2_e;
  const float v_scale = params.v_scale[head];
  Rows rows;
  rows.begin(Rows::load(params.q + head_offset, first_row + warp % Shape::kRowGroups * 16 + g, params.seq_len, t),
             blockIdx.x == 0 && head == 0);
  clock.mark(Phase::kQLoad);
  ptx::barrier_sync(SpecializedBarrier::kBlock, kThreads);  // the mbarriers are initialized

  // Both places change to the other stage by one bit.
  static_assert((kStageBytes & (kStageBytes - 1)) == 0, "stages of a power of two");
  const int group_begin = group * Cfg::kStages * kStageBytes;
  int k_at = group_begin + Rows::k_place(g, t);
  int v_at = group_begin + sizeof(Tile) + Rows::v_place(g, t);
#pragma unroll 1
  for (int tile = group; tile < tiles; tile += kGroups) {
    const int round = tile / kGroups, at = group * Cfg::kStages + round % Cfg::kStages;
    ptx::mbarrier_wait(shared.full[at], round / Cfg::kStages % 2);
    clock.mark(Phase::kKvPrefetch);
    rows.template attend<kHeadDim == 64>(smem, k_at, v_at, tile, params.seq_len, scale_log2, clock, [&] {
      __syncwarp();
      if (lane == 0) shared.empty[at].arrive();
    });
    k_at ^= kStageBytes;
    v_at ^= kStageBytes;
  }
  const auto meet = [] { ptx::barrier_sync(SpecializedBarrier::kConsumers, Shape::kThreads); };
  meet();  // every tile that was copied has been read: the partial results take the place of the stages
  rows.combine(shared.codes.partial, params.out + head_offset, first_row, params.seq_len, v_scale, clock, meet);
  clock.write();
}

}  // namespace greenfast

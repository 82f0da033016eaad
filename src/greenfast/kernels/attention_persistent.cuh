// Stage 3B with persistent blocks: as many as the multiprocessors hold, each of which computes every so many-th work, 32
// query rows of a head.
//
// While the partial results of one work are combined, the first tiles of K and V and the queries of the next come in:
// so the stages that these tiles go to are not where the partial results lie.
#pragma once

#include "registers_steps.cuh"

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
__device__ __forceinline__ void attention_persistent(const RegistersParams& params, int heads) {
  static_assert(Cfg::kHeadDim == 64 || Cfg::kHeadDim == 128, "head_dim is 64 or 128");
  static_assert(Cfg::kStages == 2, "two stages");

  using Shape = RegistersShape<Cfg>;
  using Rows = RegistersRows<Cfg>;
  using Storage = PersistentStorage<Cfg>;
  using Tile = typename Rows::Tile;
  using Phase = RegistersPhase;
  constexpr int kHeadDim = Shape::kHeadDim, kKeys = Shape::kKeys, kGroups = Shape::kKeyGroups;
  constexpr int kSecond = sizeof(Storage::first);  // byte of the second stages
  static_assert((kSecond & (kSecond - 1)) == 0, "the places in both stages differ by one bit");
  static_assert(sizeof(Storage) == Cfg::kSmemBytes, "the plan of shared memory in Python differs from the map");

  extern __shared__ __align__(128) unsigned char smem[];
  Storage& shared = *reinterpret_cast<Storage*>(smem);
  PhaseClock<Cfg::kPhaseClocks, Phase::kCount> clock(params.phase_cycles);

  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int warp = threadIdx.x / 32, group = warp / Shape::kRowGroups;
  const int tiles = (params.seq_len + kKeys - 1) / kKeys;
  const int row_blocks = (params.seq_len + Shape::kBlockM - 1) / Shape::kBlockM;
  const int works = row_blocks * heads;

  // As in Stage 3B the group's two warps copy its tiles in their order, each thread one piece of every kRowsPerCopy-th
  // row. Rows beyond the end become zero and are not read.
  constexpr int kRowsPerCopy = Shape::kGroupThreads / Tile::kPieces;
  constexpr int kNext = kGroups * kKeys;  // rows from one tile of the group to the next
  const int copy_row = threadIdx.x % Shape::kGroupThreads / Tile::kPieces, copy_piece = threadIdx.x % Tile::kPieces;
  unsigned char* const copy_to = shared.first[group].k.bytes + Tile::place(copy_row, copy_piece);
  const unsigned char* k_next = nullptr;
  const unsigned char* v_next = nullptr;
  int rows_left = 0;
  const auto fetch = [&](int at) {  // into the first stage or, `at` bytes behind it, the second
#pragma unroll
    for (int row = 0; row < kKeys; row += kRowsPerCopy) {
      const int bytes = row < rows_left ? 16 : 0;
      unsigned char* const to = copy_to + at + row * kHeadDim;
      ptx::cp_async_16(to, k_next + row * kHeadDim, bytes);
      ptx::cp_async_16(to + sizeof(Tile), v_next + row * kHeadDim, bytes);
    }
    ptx::cp_async_commit();
    k_next += kNext * kHeadDim;
    v_next += kNext * kHeadDim;
    rows_left -= kNext;
  };

  // What a work needs before its first product; nothing here waits for it. Of 128 columns the codes of Q would take more
  // registers than there are, while O is not yet written.
  constexpr bool kQAhead = kHeadDim == 64;
  int first_row = 0;
  size_t head_offset = 0;
  float scale_log2 = 0.0f, v_scale = 0.0f;
  typename Rows::QCodes codes;
  const auto load_q = [&] {
    const int row = first_row + warp % Shape::kRowGroups * 16 + g;
    codes = Rows::load(params.q + head_offset, row, params.seq_len, t);
  };
  const auto begin = [&](int work) {
    const int head = work / row_blocks;
    first_row = work % row_blocks * Shape::kBlockM;
    head_offset = static_cast<size_t>(head) * params.seq_len * kHeadDim;
    const size_t copy_offset = head_offset + (group * kKeys + copy_row) * kHeadDim + copy_piece * 16;
    k_next = params.k + copy_offset;
    v_next = params.v + copy_offset;
    rows_left = params.seq_len - group * kKeys - copy_row;
    fetch(0);
    const float log2_e = 1.4426950408889634f;
    scale_log2 = params.q_scale[head] * params.k_scale[head] * params.softmax_scale * log2_e;
    v_scale = params.v_scale[head];
    if constexpr (kQAhead) load_q();
  };

  Rows rows;
  int work = blockIdx.x;
  begin(work);
#pragma unroll 1
  while (true) {
    fetch(kSecond);
    if constexpr (!kQAhead) load_q();
    rows.begin(codes, work == 0);
    clock.mark(Phase::kQLoad);

    int k_at = group * sizeof(shared.first[0]) + Rows::k_place(g, t);
    int v_at = group * sizeof(shared.first[0]) + sizeof(Tile) + Rows::v_place(g, t);
    int stage = 0;  // the byte at which it begins
#pragma unroll 1
    for (int tile = group; tile < tiles; tile += kGroups) {
      // Behind branches, as the compiler would move a wait up past the products, or past the loads of Q.
      if (tile == group) {
        ptx::cp_async_wait<1>();
      } else {
        ptx::cp_async_wait<0>();
      }
      ptx::barrier_sync(1 + group, Shape::kGroupThreads);  // both warps have this tile, and have read the one before
      if (tile > group) {
        fetch(stage);
        stage ^= kSecond;
        k_at ^= kSecond;
        v_at ^= kSecond;
      }
      clock.mark(Phase::kKvPrefetch);
      rows.template attend<false>(smem, k_at, v_at, tile, params.seq_len, scale_log2, clock, [] {});
    }

    // All stages are free from here on; zeros of tiles beyond the end may have been still under way.
    ptx::cp_async_wait<0>();
    __syncthreads();
    half* const out = params.out + head_offset;
    const int out_row = first_row;
    const float out_scale = v_scale;
    const int next = work + gridDim.x;
    if (next < works) begin(next);
    rows.combine(shared.partial, out, out_row, params.seq_len, out_scale, clock, [] { __syncthreads(); });
    if (next >= works) break;
    work = next;
    __syncthreads();  // the partial results have been read
  }
  clock.write();
}

}  // namespace greenfast

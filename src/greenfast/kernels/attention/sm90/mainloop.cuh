// The main loop of the Hopper attention kernel: a consumer warpgroup with 64 query rows iterates over key tiles.
//
// S = Q K^T, online softmax, P packed to E4M3, O_tile = P V, O = O * rescale + O_tile; all in registers.
#pragma once

#include "attention/nonfinite.cuh"
#include "attention/sm90/traits.cuh"
#include "attention/softmax.cuh"
#include "attention/v_scale.cuh"
#include "common/named_barriers.cuh"
#include "ptx/load.cuh"
#include "ptx/wgmma.cuh"

namespace greenfast {

// Run by the 128 threads of a consumer warpgroup. A thread holds, of rows t / 4 and t / 4 + 8 of its warp's 16 (t: its
// lane), columns 8 j + 2 (t % 4) and the next one, for all j. Register i of S and of O belongs to row i / 2 % 2 of the
// two.
template <class Traits>
struct Mainloop {
  using Score = typename RawScore<Traits::kInt8>::Type;
  using Softmax = OnlineSoftmax<Traits>;
  using Limits = typename Traits::Mask::Limits;
  using Variant = ScoreVariant<Traits>;
  static constexpr int kScores = Softmax::kScores;  // per thread
  static constexpr int kSteps = Softmax::kSteps;    // k-steps of P V
  static constexpr int kOut = Traits::kHeadDim / 2;
  static constexpr int kPartial = Traits::kOutColumns / 2;
  static constexpr int kSums = Traits::kRowSumColumns / 2;  // row sums, after the last part of O
  static constexpr int kParts = Traits::kHeadDim / Traits::kOutColumns;

  const FlashParams& p;
  FlashStorage<Traits>& shared;
  const int warpgroup;
  const ptx::Operand<Traits::kDimPanel> q_operand, k_operands;
  const ptx::Operand<Traits::kKeyPanel> v_operands;
  Ring<Traits::kStages> k_ring, v_ring;
  ScoreScales<Traits> scales;
  VScaleTracker<Traits> v_scale;
  bool has_p;  // with kSkip and kOverlap: the last tile was not skipped, its P V is to be issued
  float o[kOut + kSums];
  Softmax softmax;
  NonFiniteCheck nonfinite;

  __device__ __forceinline__ Mainloop(const FlashParams& p, FlashStorage<Traits>& shared, int warpgroup)
      : p(p),
        shared(shared),
        warpgroup(warpgroup),
        q_operand(shared.q[warpgroup]),
        k_operands(shared.k),
        v_operands(shared.v) {}

  // Starts a work tile. first_row: of the warpgroup, in the sequence. q_scale: of this thread's rows.
  __device__ __forceinline__ void start(const typename Traits::Sequence& sequence, const typename Traits::Keys& keys,
                                        int first_row, const float (&q_scale)[ScoreScales<Traits>::kRowScales]) {
    scales.start(p, sequence, keys, q_scale);
    v_scale.start();
#pragma unroll
    for (float& x : o) x = 0.0f;
    softmax.start();
    if constexpr (Traits::kScheduled) nonfinite.start();
    if constexpr (Traits::kSkip) {  // rows after the last one need no tile
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int row = first_row + threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4 + 8 * r;
        if (row >= sequence.q_len()) softmax.top[r] = CUDART_INF_F;
      }
    }
  }

  // Processes the key tiles of a work tile, in the order of WindowTiles (kernel.cuh). limits: of this thread's two rows,
  // relative to the first tile; without kWindow relative to the first masked one.
  __device__ __forceinline__ void run(int begun, int both, int unmasked, int masked, Limits& limits) {
    const auto next_masked = [&] {
      for (int r = 0; r < Traits::Mask::kLimits; ++r) limits[r] -= Traits::kBlockN;
    };
    const int unmasked_keys = unmasked * Traits::kBlockN;
    const auto skip_unmasked = [&] {
      for (int r = 0; r < Traits::Mask::kLimits; ++r) limits[r] -= unmasked_keys;
    };
    warp_scheduler_barrier_sync();
    if constexpr (!Traits::kOverlap) {
      if constexpr (Traits::kWindow) {
        for (; begun > 0; --begun, next_masked()) step<TileMask::kBegin>(limits);
        for (; both > 0; --both, next_masked()) step<TileMask::kBoth>(limits);
        skip_unmasked();
      }
      for (; unmasked > 0; --unmasked) step<TileMask::kNone>(limits);
      for (; masked > 0; --masked, next_masked()) step<TileMask::kEnd>(limits);
    } else if ((Traits::kWindow ? begun + both : 0) + unmasked + masked > 0) {
      unsigned p_frag[kSteps][4];
      float rescale[2], partial[kOut + kSums];
      if (Traits::kWindow && begun > 0) {
        overlapped_step<TileMask::kBegin, Before::kNone>(p_frag, rescale, limits);
        --begun;
        next_masked();
      } else if (Traits::kWindow && both > 0) {
        overlapped_step<TileMask::kBoth, Before::kNone>(p_frag, rescale, limits);
        --both;
        next_masked();
      } else if (unmasked > 0) {
        overlapped_step<TileMask::kNone, Before::kNone>(p_frag, rescale, limits);
        --unmasked;
      } else {
        overlapped_step<TileMask::kEnd, Before::kNone>(p_frag, rescale, limits);
        --masked;
        next_masked();
      }
      if constexpr (Traits::kWindow) {
        for (; begun > 0; --begun, next_masked()) {
          next_step<TileMask::kBegin>(p_frag, rescale, limits);
        }
        for (; both > 0; --both, next_masked()) next_step<TileMask::kBoth>(p_frag, rescale, limits);
        skip_unmasked();
      }
      for (; unmasked > 0; --unmasked) next_step<TileMask::kNone>(p_frag, rescale, limits);
      for (; masked > 0; --masked, next_masked()) next_step<TileMask::kEnd>(p_frag, rescale, limits);
      warp_scheduler_barrier_sync();
      if (!Traits::kSkip || has_p) {
        start_last_pv(partial, p_frag);
        const float one[2] = {1.0f, 1.0f};
        end_last_pv(partial, rescale, one);
      }
    }
    warp_scheduler_barrier_arrive();
  }

  // Processes the tiles of a list. first_block: the index of the first block scale of the head's keys. row: the first of
  // this thread's two rows, in the work tile.
  __device__ __forceinline__ void run_list(const TileList& list, int first_block, int row) {
    warp_scheduler_barrier_sync();
    unsigned tile = list.count > 0 ? list.tile(p, 0) : 0;
    int i = 0;
    Limits bits, next_bits;
    if (list.masked > 0) Traits::Mask::load(next_bits, p.lists, list.mask(p, 0), row);
    // The number and the bits of a tile are loaded during the one before it.
    const auto start_tile = [&] {
      scales.next_block = first_block + tile;
#pragma unroll
      for (int r = 0; r < Traits::Mask::kLimits; ++r) bits[r] = next_bits[r];
      if (++i < list.count) tile = list.tile(p, i);
      if (i < list.masked) Traits::Mask::load(next_bits, p.lists, list.mask(p, i), row);
    };
    if constexpr (!Traits::kOverlap) {
      while (i < list.masked) {
        start_tile();
        step<TileMask::kBits>(bits);
      }
      while (i < list.count) {
        start_tile();
        step<TileMask::kNone>(bits);
      }
    } else if (list.count > 0) {
      unsigned p_frag[kSteps][4];
      float rescale[2], partial[kOut + kSums];
      const bool masked = list.masked > 0;
      start_tile();
      if (masked) {
        overlapped_step<TileMask::kBits, Before::kNone>(p_frag, rescale, bits);
      } else {
        overlapped_step<TileMask::kNone, Before::kNone>(p_frag, rescale, bits);
      }
      while (i < list.masked) {
        start_tile();
        next_step<TileMask::kBits>(p_frag, rescale, bits);
      }
      while (i < list.count) {
        start_tile();
        next_step<TileMask::kNone>(p_frag, rescale, bits);
      }
      warp_scheduler_barrier_sync();
      if (!Traits::kSkip || has_p) {
        start_last_pv(partial, p_frag);
        const float one[2] = {1.0f, 1.0f};
        end_last_pv(partial, rescale, one);
      }
    }
    warp_scheduler_barrier_arrive();
  }

  // Consumes tiles `tile` .. `stop` - 1 without computing: only later rows of the work tile attend to them.
  __device__ __forceinline__ void skip(int tile, int stop) {
    for (; tile < stop; ++tile) {
      warp_scheduler_barrier_sync();
      warp_scheduler_barrier_arrive();
      shared.k_full[k_ring.stage].wait(k_ring.parity);
      arrive(shared.k_empty[k_ring.stage]);
      k_ring.advance();
      skip_v();
    }
  }

  // With kPingPong, warpgroups issue their wgmmas in turn: P V of a tile and Q K^T of the next. Without this order they
  // run in lockstep and compete for the tensor cores.
  __device__ __forceinline__ void warp_scheduler_barrier_sync() {
    if constexpr (Traits::kPingPong) ptx::barrier_sync(Sm90Barrier::kPingPong + warpgroup, 256);
  }
  __device__ __forceinline__ void warp_scheduler_barrier_arrive() {
    if constexpr (Traits::kPingPong) {
      ptx::barrier_arrive(Sm90Barrier::kPingPong + (warpgroup + 1 == Traits::kConsumers ? 0 : warpgroup + 1), 256);
    }
  }

 private:
  // With kOverlap, the tile before one: none, a skipped one, or one with a P V that is still to be issued.
  enum class Before { kNone, kSkipped, kTile };

  __device__ __forceinline__ static void arrive(ptx::Mbarrier& barrier) {
    if (threadIdx.x % 32 == 0) barrier.arrive();
  }

  // One key tile without kOverlap, from one ping-pong turn to the next.
  template <TileMask kMasked>
  __device__ __forceinline__ void step(const Limits& limits) {
    Score s[kScores];
    unsigned p_frag[kSteps][4];
    float p_fp32[kScores], rescale[2];
    init_scores(s);
    shared.k_full[k_ring.stage].wait(k_ring.parity);
    start_qk(s);
    warp_scheduler_barrier_arrive();
    end_qk<0>(s);
    float (&scores)[kScores] = Variant::scores(s, scales), row_max[2];
    mask_scores<kMasked>(scores, limits, row_max);
    if (skips(row_max)) {
      v_scale.load(p, scales.next_block);
      check_scales();
      warp_scheduler_barrier_sync();
      return skip_v();
    }
    apply_softmax(scores, row_max, p_fp32, rescale);
    Softmax::pack(p_fp32, p_frag);
    v_scale.acc_rescale = next_acc_rescale();
    check_scales();
    shared.v_full[v_ring.stage].wait(v_ring.parity);
    warp_scheduler_barrier_sync();
#pragma unroll
    for (int part = 0; part < kParts - 1; ++part) {
      float partial[kPartial];
      start_pv<false>(partial, p_frag, part);
      ptx::wgmma_wait<0>();
      ptx::pin(partial);
      promote_output(partial, part, rescale);
    }
    float last[kPartial + kSums];
    start_pv<false>(last, p_frag, kParts - 1);
    ptx::wgmma_wait<0>();
    ptx::pin(last);
    promote_output(last, kParts - 1, rescale);
    release_v();
  }

  // One key tile with kOverlap: returns its P and rescale factors; its P V is issued in the next tile's turn and runs
  // during that tile's softmax. A skipped tile has no P, and leaves O, its scale and the base as they are.
  template <TileMask kMasked, Before kBefore>
  __device__ __forceinline__ void overlapped_step(unsigned (&p_frag)[kSteps][4], float (&rescale)[2],
                                                  const Limits& limits) {
    Score s[kScores];
    float p_fp32[kScores], partial[kOut + kSums], next[2];
    init_scores(s);
    shared.k_full[k_ring.stage].wait(k_ring.parity);
    if constexpr (kBefore != Before::kNone) warp_scheduler_barrier_sync();
    start_qk(s);
    if constexpr (kBefore == Before::kTile) start_last_pv(partial, p_frag);
    warp_scheduler_barrier_arrive();
    end_qk<kBefore == Before::kTile ? 1 : 0>(s);
    float (&scores)[kScores] = Variant::scores(s, scales), row_max[2];
    mask_scores<kMasked>(scores, limits, row_max);
    if (skips(row_max)) {
      const float one[2] = {1.0f, 1.0f};
      v_scale.load(p, scales.next_block);
      check_scales();
      if constexpr (kBefore == Before::kTile) end_last_pv(partial, rescale, one);
      has_p = false;
      return skip_v();
    }
    apply_softmax(scores, row_max, p_fp32, next);
    has_p = true;
    const float acc_rescale = next_acc_rescale();
    check_scales();
    const float factor[2] = {next[0] * acc_rescale, next[1] * acc_rescale};
    if constexpr (kBefore == Before::kTile) {
      end_last_pv(partial, rescale, factor);
    } else if constexpr (kBefore == Before::kSkipped && !Traits::kPromoteAccum) {
      rescale_output(factor);
    }
    v_scale.acc_rescale = acc_rescale;
#pragma unroll
    for (int r = 0; r < 2; ++r) rescale[r] = next[r];
    Softmax::pack(p_fp32, p_frag);  // only now: P V has read p_frag
  }

  // A tile that is not the first.
  template <TileMask kMasked>
  __device__ __forceinline__ void next_step(unsigned (&p_frag)[kSteps][4], float (&rescale)[2], const Limits& limits) {
    if (!Traits::kSkip || has_p) {
      overlapped_step<kMasked, Before::kTile>(p_frag, rescale, limits);
    } else {
      overlapped_step<kMasked, Before::kSkipped>(p_frag, rescale, limits);
    }
  }

  // Sets the accumulators of int8 scores to RawScore::kStart. By loads: one instruction sets four registers, on a pipe
  // that the softmax leaves idle.
  __device__ __forceinline__ void init_scores(Score (&s)[kScores]) {
    if constexpr (Traits::kInt8) {
#pragma unroll
      for (int i = 0; i < kScores; i += 4) {
        ptx::load_shared_again(reinterpret_cast<int (&)[4]>(s[i]), shared.score_start);
      }
    }
  }

  // Issues s = Q K^T (raw scores).
  __device__ __forceinline__ void start_qk(Score (&s)[kScores]) {
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < Traits::kHeadDim / 32; ++i) {
      const int panel = i * 32 / Traits::kDimPanel, panel_offset = i * 32 % Traits::kDimPanel;
      const unsigned long long q = q_operand.at(panel * sizeof(shared.q[0][0]) + panel_offset);
      const unsigned long long k =
          k_operands.at(k_ring.stage * sizeof(shared.k[0]) + panel * sizeof(shared.k[0][0]) + panel_offset);
      i == 0 && !Traits::kInt8 ? ptx::wgmma_set(s, q, k) : ptx::wgmma_add(s, q, k);
    }
    ptx::wgmma_commit();
    scales.next(p);
  }

  // Waits until s is complete, with kPending later wgmma groups in flight; releases the K stage.
  template <int kPending>
  __device__ __forceinline__ void end_qk(Score (&s)[kScores]) {
    ptx::wgmma_wait<kPending>();
    ptx::pin(s);
    arrive(shared.k_empty[k_ring.stage]);
    k_ring.advance();
  }

  // Masks the scores of a tile, and returns this thread's part of its rows' largest ones.
  template <TileMask kMasked>
  __device__ __forceinline__ void mask_scores(float (&scores)[kScores], const Limits& limits, float (&row_max)[2]) {
    if constexpr (kMasked != TileMask::kNone) Traits::Mask::template apply<kMasked>(scores, limits);
    softmax.template thread_tops<Variant>(scores, Variant::scales(scales), row_max);
  }

  // Whether the warpgroup skips a tile: all of its threads can.
  __device__ __forceinline__ bool skips(const float (&row_max)[2]) {
    if constexpr (!Traits::kSkip) return false;
    return ptx::barrier_all(Sm90Barrier::kWarpgroup + warpgroup, 128, softmax.can_skip(row_max, p.skip_log2));
  }

  __device__ __forceinline__ void apply_softmax(float (&scores)[kScores], float (&row_max)[2], float (&p_fp32)[kScores],
                                                float (&rescale)[2]) {
    const float before[2] = {sum(0), sum(1)};
    softmax.template online_softmax<Variant>(scores, Variant::scales(scales), row_max, before, p_fp32, rescale);
  }

  __device__ __forceinline__ void check_scales() {
    if constexpr (Traits::kScheduled) nonfinite.add(scales.k_scale, v_scale.tile_scale);
  }

  // The row sum over the tiles that have been added to O.
  __device__ __forceinline__ float sum(int row) const {
    if constexpr (Traits::kRowSumByMma) return o[kOut + 2 * row];
    return softmax.sum[row];
  }

  // The factor that changes O's V scale to the scale of the tile with the newest P.
  __device__ __forceinline__ float next_acc_rescale() { return v_scale.next(p, scales.next_block); }

  // Issues partial = P V, or += with kAdd, for a part of O's columns; with the last part, the row sums of P too.
  template <bool kAdd, int kCount>
  __device__ __forceinline__ void start_pv(float (&partial)[kCount], const unsigned (&p_frag)[kSteps][4], int part) {
    ptx::wgmma_fence();
#pragma unroll
    for (int t = 0; t < kSteps; ++t) {
      const int panel = t * 32 / Traits::kKeyPanel, panel_offset = t * 32 % Traits::kKeyPanel;
      const unsigned long long v = v_operands.at(v_ring.stage * sizeof(shared.v[0]) + panel * sizeof(shared.v[0][0]) +
                                                 part * Traits::kOutColumns * Traits::kKeyPanel + panel_offset);
      t == 0 && !kAdd ? ptx::wgmma_set(partial, p_frag[t], v) : ptx::wgmma_add(partial, p_frag[t], v);
    }
    ptx::wgmma_commit();
  }

  // O = O * rescale + partial, for a part of O's columns.
  template <int kCount>
  __device__ __forceinline__ void promote_output(const float (&partial)[kCount], int part, const float (&rescale)[2]) {
    const float acc_rescale =
        Traits::kValueBlockScales ? v_scale.acc_rescale : 1.0f;  // not for row sums: they have no V scale
    const float acc_factor[2] = {rescale[0] * acc_rescale, rescale[1] * acc_rescale};
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      float& x = o[part * kPartial + i];
      x = fmaf(x, i < kPartial ? acc_factor[i / 2 % 2] : rescale[i / 2 % 2], partial[i]);
    }
  }

  __device__ __forceinline__ void start_last_pv(float (&partial)[kOut + kSums], const unsigned (&p_frag)[kSteps][4]) {
    shared.v_full[v_ring.stage].wait(v_ring.parity);
    if constexpr (Traits::kPromoteAccum) {
      start_pv<false>(partial, p_frag, 0);
    } else {
      start_pv<true>(o, p_frag, 0);
    }
  }

  // Without kPromoteAccum, O is rescaled by the factors of the next tile before that tile is added.
  __device__ __forceinline__ void end_last_pv(float (&partial)[kOut + kSums], const float (&rescale)[2],
                                              const float (&next)[2]) {
    ptx::wgmma_wait<0>();
    if constexpr (Traits::kPromoteAccum) {
      ptx::pin(partial);
      promote_output(partial, 0, rescale);
    } else {
      ptx::pin(o);
      rescale_output(next);
    }
    release_v();
  }

  __device__ __forceinline__ void rescale_output(const float (&factor)[2]) {
    if (__any_sync(0xffffffffu, factor[0] != 1.0f || factor[1] != 1.0f)) {
#pragma unroll
      for (int i = 0; i < kOut + kSums; ++i) o[i] *= factor[i / 2 % 2];
    }
  }

  __device__ __forceinline__ void skip_v() {
    shared.v_full[v_ring.stage].wait(v_ring.parity);
    release_v();
  }

  __device__ __forceinline__ void release_v() {
    arrive(shared.v_empty[v_ring.stage]);
    v_ring.advance();
  }
};

}  // namespace greenfast

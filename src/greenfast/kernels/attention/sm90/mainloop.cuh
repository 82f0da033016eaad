// The main loop of the Hopper attention kernel: a consumer warpgroup and its 64 query rows, from tile to tile of keys.
//
// S = Q K^T into registers, online softmax, P packed to E4M3 where it lies, O_tile = P V from zero, O = O * rescale +
// O_tile.
#pragma once

#include "attention/softmax.cuh"
#include "attention/sm90/traits.cuh"
#include "attention/value_units.cuh"
#include "common/named_barriers.cuh"
#include "ptx/load.cuh"
#include "ptx/wgmma.cuh"

namespace greenfast {

// A thread holds, of rows t / 4 and t / 4 + 8 of its warp's 16 (t: its lane), columns 8 j + 2 (t % 4) and the next one,
// for all j. Register i of scores and of O belongs to row i / 2 % 2 of the two.
template <class Traits>
struct Mainloop {
  using Score = typename RawScore<Traits::kInt8>::Type;
  using Softmax = OnlineSoftmax<Traits>;
  static constexpr int kScores = Softmax::kScores;  // per thread
  static constexpr int kSteps = Softmax::kSteps;    // of P V
  static constexpr int kOut = Traits::kHeadDim / 2;
  static constexpr int kPartial = Traits::kOutColumns / 2;
  static constexpr int kSums = Traits::kSumColumns / 2;  // behind the last part of O
  static constexpr int kParts = Traits::kHeadDim / Traits::kOutColumns;

  const FlashParams& p;
  FlashStorage<Traits>& shared;
  const int warpgroup;
  const ptx::Operand<Traits::kDimPanel> q_tile, k_tiles;
  const ptx::Operand<Traits::kKeyPanel> v_tiles;
  Ring<Traits::kStages> k_ring, v_ring;
  ScoreScales<Traits> scales;
  ValueUnits<Traits> units;
  float o[kOut + kSums];
  Softmax softmax;

  __device__ __forceinline__ Mainloop(const FlashParams& p, FlashStorage<Traits>& shared, int warpgroup)
      : p(p), shared(shared), warpgroup(warpgroup), q_tile(shared.q[warpgroup]), k_tiles(shared.k), v_tiles(shared.v) {}

  // Of a work tile. q_scale: of this thread's rows.
  __device__ __forceinline__ void start(const Sequence& sequence, const KeyRows& keys,
                                        const float (&q_scale)[ScoreScales<Traits>::kRowScales]) {
    scales.start(p, sequence, keys, q_scale);
    units.start();
#pragma unroll
    for (float& x : o) x = 0.0f;
    softmax.start();
  }

  // All tiles of a work tile: `whole` of which these rows attend to all keys, and `masked` more. end: of the keys of
  // this thread's two rows, counted from the first masked tile.
  __device__ __forceinline__ void run(int whole, int masked, int (&end)[2]) {
    const auto next_masked = [&] {
      for (int r = 0; r < 2; ++r) end[r] -= Traits::kBlockN;
    };
    take_turn();
    if constexpr (!Traits::kOverlap) {
      for (; whole > 0; --whole) step<false>(end);
      for (; masked > 0; --masked, next_masked()) step<true>(end);
    } else if (whole + masked > 0) {
      unsigned weights[kSteps][4];
      float rescale[2], partial[kOut + kSums];
      if (whole > 0) {
        overlapped_step<false, true>(weights, rescale, end);
        --whole;
      } else {
        overlapped_step<true, true>(weights, rescale, end);
        --masked;
        next_masked();
      }
      for (; whole > 0; --whole) overlapped_step<false, false>(weights, rescale, end);
      for (; masked > 0; --masked, next_masked()) overlapped_step<true, false>(weights, rescale, end);
      take_turn();
      start_last_output(partial, weights);
      const float one[2] = {1.0f, 1.0f};
      end_last_output(partial, rescale, one);
    }
    pass_turn();
  }

  // Tiles `tile` .. `stop` - 1, to which only later rows of the work tile attend.
  __device__ __forceinline__ void skip(int tile, int stop) {
    for (; tile < stop; ++tile) {
      take_turn();
      pass_turn();
      shared.k_full[k_ring.stage].wait(k_ring.parity);
      arrive(shared.k_empty[k_ring.stage]);
      k_ring.advance();
      shared.v_full[v_ring.stage].wait(v_ring.parity);
      release_values();
    }
  }

  // With kPingPong, warpgroups start their products one after the other: P V of a tile and Q K^T of the next. Left
  // alone they fall into step, and all wait for the same unit.
  __device__ __forceinline__ void take_turn() {
    if constexpr (Traits::kPingPong) ptx::barrier_sync(Sm90Barrier::kPingPong + warpgroup, 256);
  }
  __device__ __forceinline__ void pass_turn() {
    if constexpr (Traits::kPingPong) {
      ptx::barrier_arrive(Sm90Barrier::kPingPong + (warpgroup + 1 == Traits::kConsumers ? 0 : warpgroup + 1), 256);
    }
  }

 private:
  __device__ __forceinline__ static void arrive(ptx::Mbarrier& barrier) {
    if (threadIdx.x % 32 == 0) barrier.arrive();
  }

  // One tile of keys, from this warpgroup's turn to its next one.
  template <bool kMasked>
  __device__ __forceinline__ void step(const int (&end)[2]) {
    Score s[kScores];
    unsigned weights[kSteps][4];
    float w[kScores], rescale[2];
    prepare_scores(s);
    shared.k_full[k_ring.stage].wait(k_ring.parity);
    start_scores(s);
    pass_turn();
    end_scores<0>(s);
    weigh<kMasked>(s, end, w, rescale);
    Softmax::pack(w, weights);
    units.ratio = next_ratio();
    shared.v_full[v_ring.stage].wait(v_ring.parity);
    take_turn();
#pragma unroll
    for (int part = 0; part < kParts - 1; ++part) {
      float partial[kPartial];
      start_output<false>(partial, weights, part);
      ptx::wgmma_wait<0>();
      ptx::pin(partial);
      add_output(partial, part, rescale);
    }
    float last[kPartial + kSums];
    start_output<false>(last, weights, kParts - 1);
    ptx::wgmma_wait<0>();
    ptx::pin(last);
    add_output(last, kParts - 1, rescale);
    release_values();
  }

  // The same where P V of a tile runs during the softmax of the next one: a tile leaves its weights and factors, and
  // P V begins in the turn of the next tile.
  template <bool kMasked, bool kFirst>
  __device__ __forceinline__ void overlapped_step(unsigned (&weights)[kSteps][4], float (&rescale)[2],
                                                  const int (&end)[2]) {
    Score s[kScores];
    float w[kScores], partial[kOut + kSums], next[2];
    prepare_scores(s);
    shared.k_full[k_ring.stage].wait(k_ring.parity);
    if constexpr (!kFirst) take_turn();
    start_scores(s);
    if constexpr (!kFirst) start_last_output(partial, weights);
    pass_turn();
    end_scores<kFirst ? 0 : 1>(s);
    weigh<kMasked>(s, end, w, next);
    const float ratio = next_ratio();
    if constexpr (!kFirst) end_last_output(partial, rescale, {next[0] * ratio, next[1] * ratio});
    units.ratio = ratio;
#pragma unroll
    for (int r = 0; r < 2; ++r) rescale[r] = next[r];
    Softmax::pack(w, weights);  // not before: P V was reading them
  }

  // Where sums of int8 start. Loads: four registers for one instruction, on a pipe that the softmax leaves idle.
  __device__ __forceinline__ void prepare_scores(Score (&s)[kScores]) {
    if constexpr (Traits::kInt8) {
#pragma unroll
      for (int i = 0; i < kScores; i += 4) {
        ptx::load_shared_again(reinterpret_cast<int(&)[4]>(s[i]), shared.score_start);
      }
    }
  }

  // Starts s = q k^T, raw.
  __device__ __forceinline__ void start_scores(Score (&s)[kScores]) {
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < Traits::kHeadDim / 32; ++i) {
      const int panel = i * 32 / Traits::kDimPanel, within = i * 32 % Traits::kDimPanel;
      const unsigned long long q = q_tile.at(panel * sizeof(shared.q[0][0]) + within);
      const unsigned long long k =
          k_tiles.at(k_ring.stage * sizeof(shared.k[0]) + panel * sizeof(shared.k[0][0]) + within);
      i == 0 && !Traits::kInt8 ? ptx::wgmma_set(s, q, k) : ptx::wgmma_add(s, q, k);
    }
    ptx::wgmma_commit();
    scales.next(p);
  }

  // Ends it, while kPending later products are under way: the scores may be read, and K overwritten.
  template <int kPending>
  __device__ __forceinline__ void end_scores(Score (&s)[kScores]) {
    ptx::wgmma_wait<kPending>();
    ptx::pin(s);
    arrive(shared.k_empty[k_ring.stage]);
    k_ring.advance();
  }

  template <bool kMasked>
  __device__ __forceinline__ void weigh(Score (&s)[kScores], const int (&end)[2], float (&w)[kScores],
                                        float (&rescale)[2]) {
    using Variant = ScoreVariant<Traits>;
    float(&scores)[kScores] = Variant::scores(s, scales);
    const float before[2] = {sum(0), sum(1)};
    if constexpr (kMasked) Traits::Mask::apply(scores, end);
    softmax.template weigh<Variant>(scores, Variant::scales(scales), before, w, rescale);
  }

  // Of a row's weights in those tiles that have been added to O.
  __device__ __forceinline__ float sum(int row) const {
    if constexpr (Traits::kSumsByProduct) return o[kOut + 2 * row];
    return softmax.sum[row];
  }

  // By which O is to be multiplied for its units to be those of the tile whose weights have been found.
  __device__ __forceinline__ float next_ratio() { return units.next(p, scales.next_block); }

  // Starts partial = P V or += P V, of the columns of a part of O, and behind the last part the sums of P.
  template <bool kAdd, int kCount>
  __device__ __forceinline__ void start_output(float (&partial)[kCount], const unsigned (&weights)[kSteps][4],
                                               int part) {
    ptx::wgmma_fence();
#pragma unroll
    for (int t = 0; t < kSteps; ++t) {
      const int panel = t * 32 / Traits::kKeyPanel, within = t * 32 % Traits::kKeyPanel;
      const unsigned long long v = v_tiles.at(v_ring.stage * sizeof(shared.v[0]) + panel * sizeof(shared.v[0][0]) +
                                              part * Traits::kOutColumns * Traits::kKeyPanel + within);
      t == 0 && !kAdd ? ptx::wgmma_set(partial, weights[t], v) : ptx::wgmma_add(partial, weights[t], v);
    }
    ptx::wgmma_commit();
  }

  // Adds a part to what came before, which it rescales.
  template <int kCount>
  __device__ __forceinline__ void add_output(const float (&partial)[kCount], int part, const float (&rescale)[2]) {
    const float ratio = Traits::kValueBlockScales ? units.ratio : 1.0f;  // not of the sums, which have no units
    const float of_output[2] = {rescale[0] * ratio, rescale[1] * ratio};
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      float& x = o[part * kPartial + i];
      x = fmaf(x, i < kPartial ? of_output[i / 2 % 2] : rescale[i / 2 % 2], partial[i]);
    }
  }

  __device__ __forceinline__ void start_last_output(float (&partial)[kOut + kSums],
                                                    const unsigned (&weights)[kSteps][4]) {
    shared.v_full[v_ring.stage].wait(v_ring.parity);
    if constexpr (Traits::kTwoLevels) {
      start_output<false>(partial, weights, 0);
    } else {
      start_output<true>(o, weights, 0);
    }
  }

  // With one level of accumulation, O is rescaled by the factors of the next tile before that is added.
  __device__ __forceinline__ void end_last_output(float (&partial)[kOut + kSums], const float (&rescale)[2],
                                                  const float (&next)[2]) {
    ptx::wgmma_wait<0>();
    if constexpr (Traits::kTwoLevels) {
      ptx::pin(partial);
      add_output(partial, 0, rescale);
    } else {
      ptx::pin(o);
      if (__any_sync(0xffffffffu, next[0] != 1.0f || next[1] != 1.0f)) {
#pragma unroll
        for (int i = 0; i < kOut + kSums; ++i) o[i] *= next[i / 2 % 2];
      }
    }
    release_values();
  }

  __device__ __forceinline__ void release_values() {
    arrive(shared.v_empty[v_ring.stage]);
    v_ring.advance();
  }
};

}  // namespace greenfast

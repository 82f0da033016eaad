// A consumer warpgroup and its 64 rows: the main loop over tiles of keys.
#pragma once

#include <math_constants.h>

#include "attention/sm90/traits.cuh"
#include "ptx/barrier.cuh"
#include "ptx/griddepcontrol.cuh"
#include "ptx/wgmma.cuh"
#include "serving/output.cuh"
#include "serving/quantize_q.cuh"
#include "serving/softmax.cuh"
#include "serving/value_stage.cuh"

namespace greenfast::serving {

// An operand's tile in a stage. Apart from the products, so that each of them adds a constant to it and no more.
template <unsigned kStageBytes, class Operand>
__device__ __forceinline__ Operand stage_of(Operand tiles, int stage) {
  tiles.low += stage * (kStageBytes / 16);
  return tiles;
}

// A thread's rows and columns of O are those of scores (Softmax). Registers follow the order of the members.
template <class T>
struct Consumer : Output<T> {
  using Base = Output<T>;
  using Base::begun, Base::column_part, Base::held, Base::kOut, Base::o, Base::row_part, Base::sums;
  using Base::end_chunk, Base::end_piece, Base::leave, Base::merge_pieces, Base::store;
  using Base::kThreads, Base::p, Base::rows, Base::shared;
  using Base::out_row, Base::partial, Base::partial_rows, Base::unit_of;
  using typename Base::Finish;
  static constexpr int kScores = Softmax<T>::kScores, kSteps = Softmax<T>::kSteps;

  const ptx::Operand<T::kPanel> q_tile, k_tiles;
  const ValueOperand<T> v_tiles;
  Ring<T::kStages> k_ring, v_ring;
  Ring<T::kFactorStages> factors_ring;
  unsigned q_parity = 0;

  Softmax<T> softmax;           // of the present chunk
  int whole_first, whole_stop;  // tiles whose keys all rows attend to

  __device__ __forceinline__ Consumer(const AttentionParams& p, Storage<T>& shared, int warpgroup)
      : Base{{p, shared, shared.rows[warpgroup / T::kColumnParts]},
             shared.sums[warpgroup],
             warpgroup / T::kColumnParts,
             warpgroup % T::kColumnParts},
        q_tile(shared.q[row_part]),
        k_tiles(shared.k),
        v_tiles(shared.v[0][0] + column_part * T::kColumns * 16) {}

  __device__ __forceinline__ static void arrive(ptx::Mbarrier& barrier) {
    if (threadIdx.x % 32 == 0) barrier.arrive();
  }
  __device__ __forceinline__ void sync_rows() const { ptx::barrier_sync(Barrier::kRows + row_part, T::kRowThreads); }

  // Until it is said which work is next.
  __device__ __forceinline__ void await_work() {
    shared.q_full.wait(q_parity);
    q_parity ^= 1;
    if constexpr (T::kQueriesAhead) fetch_queries_ahead(p, shared, row_part);
  }

  // The next work: whether there is any, what its rows attend to, and their Q, quantized.
  __device__ __forceinline__ bool begin_work() {
    sync_rows();  // the last work is over
    if constexpr (!T::kQueriesAhead) await_work();
    const Work work = shared.next;
    if (work.chunks == 0) return false;
    if (row_thread<T>() == 0) {
      rows.work = work;
      if constexpr (T::kScalesAhead) rows.unit = shared.next_scales[1];
    }
    const RowTile& tile = work.tile;
    const int group = p.batch.group, first = tile.first_row + row_part * 64, stop = tile.q_len * group;
    // Rows behind the last have its keys, and are not written.
    const auto token_of = [&](int row) { return p.batch.token(min(first + row, stop - 1)); };
    float scale = p.softmax_scale;
    const auto of_head = [&](const float* scales, const int (&strides)[2]) {
      return scales[static_cast<long long>(tile.sequence) * strides[0] + work.head * strides[1]];
    };
    if constexpr (T::kScalesAhead) {
      scale *= shared.next_scales[0];
    } else if constexpr (!T::kTokenScales) {
      scale *= of_head(p.k_scale, p.k_scale_strides);
    }
    if constexpr (T::kCodedQueries) scale *= of_head(p.q_scale, p.q_scale_strides);
    scale = T::kSoftcap ? scale / p.softcap : scale * kLog2E;
    // Factors of the maximum are to be positive: a negative one is its absolute value and -Q.
    const unsigned signs = scale < 0.0f ? 0x80808080u : 0u;
    scale = fabsf(scale);
    if (row_thread<T>() < 64) {
      rows.begin[row_thread<T>()] = p.batch.key_begin(token_of(row_thread<T>()), tile.q_len, tile.kv_len);
      rows.end[row_thread<T>()] = p.batch.key_end(token_of(row_thread<T>()), tile.q_len, tile.kv_len);
    } else if (row_thread<T>() == 64) {
      rows.whole_begin = p.batch.key_begin(token_of(63), tile.q_len, tile.kv_len);
      rows.whole_end = p.batch.key_end(token_of(0), tile.q_len, tile.kv_len);
    }
    quantize_queries(p, shared, rows, row_part, work, scale, signs);
    ptx::fence_proxy_async();
    sync_rows();
    if (row_thread<T>() == 0) shared.q_empty.arrive();
    return true;
  }

  template <int kCount>
  __device__ __forceinline__ void start_scores(float (&s)[kCount]) {
    const auto k_tile = stage_of<sizeof(shared.k[0])>(k_tiles, k_ring.stage);
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < T::kHeadDim / 32; ++i) {
      const int panel = i * 32 / T::kPanel, within = i * 32 % T::kPanel;
      const unsigned long long q = q_tile.at(panel * sizeof(shared.q[0][0]) + within);
      const unsigned long long k = k_tile.at(panel * sizeof(shared.k[0][0]) + within);
      i == 0 ? ptx::wgmma_set(s, q, k) : ptx::wgmma_add(s, q, k);
    }
    ptx::wgmma_commit();
  }

  template <int kCount>
  __device__ __forceinline__ void start_output(const unsigned (&weights)[kCount][4]) {
    const auto v_tile = stage_of<sizeof(shared.v[0])>(v_tiles, v_ring.stage);
    ptx::wgmma_fence();
#pragma unroll
    for (int t = 0; t < kCount; ++t) ptx::wgmma_add(o, weights[t], v_tile.at(2 * t * T::kGroupBytes));
    ptx::wgmma_commit();
  }

  // With kOverlap. One tile: its scores, after which P V of the tile before it runs, and its weights. Values are waited
  // for once the scores have started: with one stage they come later than the keys. kMasked: it may have a mask, with
  // kMaskInStep. kNew: it is the first of a chunk.
  template <bool kMasked, bool kFirst, bool kNew, bool kHalf = false>
  __device__ __forceinline__ void overlapped_step(int tile, unsigned (&weights)[kSteps][4]) {
    float s[kHalf ? kScores / 2 : kScores], rescale[2];
    const int stage = k_ring.stage;
    shared.k_full[stage].wait(k_ring.parity);
    bool awaited = true;
    if constexpr (!kFirst) awaited = prepare_values(tile - 1) || (T::kClearsAhead && values_are_there());
    take_turn();
    start_scores(s);
    if constexpr (kFirst || T::kStages == 1) pass_turn();  // the other's scores need no values
    if constexpr (!kFirst) {
      if (!awaited) await_values();  // without the condition the compiler spills, and waits after each product (C7511)
      start_output(weights);
      if constexpr (T::kStages > 1) pass_turn();
    }
    ptx::wgmma_wait<kFirst ? 0 : 1>();
    ptx::pin(s);
    arrive(shared.k_empty[stage]);
    const KeyFactors* const factors = shared.factors + factors_ring.stage;
    if constexpr (T::kTokenScales) {
      shared.factors_full[factors_ring.stage].wait(factors_ring.parity);
      factors_ring.advance();
    }
    k_ring.advance();
    if constexpr (!kFirst && kNew) {
      softmax.keep(sums);
      softmax.start();
    }
    const auto end_output = [&] {
      ptx::wgmma_wait<0>();
      ptx::pin(o);
      release_values();
    };
    softmax.template weigh<kMasked>(s, p, rows, factors, tile * kTile, rescale, [&](float (&factor)[2]) {
      if constexpr (!kFirst && T::kStages == 1) {
        // The next values are fetched from here on. The compiler waits before the powers of any kernel; but up to 200
        // instructions would come between that and the arrival, unless the powers need what is read behind it.
        end_output();
        if constexpr (!T::kExponents) {
          for (int r = 0; r < 2; ++r) factor[r] = load_behind(&rows.factor[own_row() + 8 * r]);
        }
      }
    }, has_mask(tile));
    if constexpr (!kFirst && T::kStages > 1) end_output();
    // Not before: P V was reading them.
    if constexpr (kHalf) {
      unsigned half[kSteps / 2][4];
      softmax.pack(s, half);
#pragma unroll
      for (int t = 0; t < kSteps; ++t) {
#pragma unroll
        for (int i = 0; i < 4; ++i) weights[t][i] = t < kSteps / 2 ? half[t % (kSteps / 2)][i] : 0;
      }
    } else {
      softmax.pack(s, weights);
    }
    if constexpr (!kFirst) {
      if constexpr (kNew) {
        end_chunk<false>((tile - 1) / (kChunk / kTile));
      } else if (__any_sync(0xffffffffu, rescale[0] != 1.0f || rescale[1] != 1.0f)) {
#pragma unroll
        for (int i = 0; i < kOut; ++i) o[i] *= rescale[i / 2 % 2];
      }
    }
  }

  // Without kOverlap. One tile, from this warpgroup's turn to its next one: P V of a tile and the scores of the next are
  // a turn. It needs fewer registers, so that more warpgroups reside, which fill each other's gaps.
  // kHalf: rows attend to keys of its first half alone, as they do in the last tile of half of causal works.
  template <bool kMasked, bool kHalf>
  __device__ __forceinline__ void step(int tile) {
    float s[kHalf ? kScores / 2 : kScores], rescale[2];
    unsigned weights[kHalf ? kSteps / 2 : kSteps][4];
    const int stage = k_ring.stage;
    shared.k_full[stage].wait(k_ring.parity);
    start_scores(s);
    pass_turn();
    if constexpr (T::kTokenScales) shared.factors_full[stage].wait(k_ring.parity);
    ptx::wgmma_wait<0>();
    ptx::pin(s);
    arrive(shared.k_empty[stage]);
    softmax.template weigh<kMasked>(s, p, rows, shared.factors + stage, tile * kTile, rescale, [](float (&)[2]) {},
                                     has_mask(tile));
    softmax.pack(s, weights);
    if (__any_sync(0xffffffffu, rescale[0] != 1.0f || rescale[1] != 1.0f)) {
#pragma unroll
      for (int i = 0; i < kOut; ++i) o[i] *= rescale[i / 2 % 2];
    }
    v_ring = k_ring;
    k_ring.advance();
    if (!kMasked || !prepare_values(tile)) await_values();
    take_turn();
    start_output(weights);
    ptx::wgmma_wait<0>();
    ptx::pin(o);
    arrive(shared.v_empty[v_ring.stage]);
  }

  __device__ __forceinline__ void await_values() const { shared.v_full[v_ring.stage].wait(v_ring.parity); }
  __device__ __forceinline__ bool values_are_there() const {
    return shared.v_full[v_ring.stage].is_over(v_ring.parity);
  }
  // Turns or clears values of a tile, where consumers are to do that; says whether they did, and waited for them. All
  // consumers meet for it, so none has its turn.
  __device__ __forceinline__ bool prepare_values(int tile) {
    constexpr bool kTurns = T::kTurnsValues && !T::kTurnsAhead;
    const int begin = rows.work.tile.key_begin - tile * kTile, end = rows.work.tile.key_end - tile * kTile;
    const bool clears = !T::kClearsAhead && !is_whole(tile) && ((begin > 0 && begin < kTile) || (end > 0 && end < kTile));
    if (kTurns || clears) await_values();
    if constexpr (kTurns) {
      turn_stage<T, 4 * T::kConsumers>(shared.v[v_ring.stage][0], threadIdx.x / 32);
      ptx::barrier_sync(Barrier::kConsumers, kThreads);
    }
    if (clears) {
      unsigned char* const stage = shared.v[v_ring.stage][0];
      T::kRowValues && !T::kTurnsValues
          ? clear_rows<T>(stage, begin, end)
          : clear_values<T, 4 * T::kConsumers>(stage, threadIdx.x / 32, 0, kTile, begin, end);
      ptx::barrier_sync(Barrier::kConsumers, kThreads);
    }
    return kTurns || clears;
  }
  __device__ __forceinline__ void release_values() {
    if constexpr (T::kRowValues && !T::kTurnsValues) {
      ptx::fence_proxy_async();  // reads are over before TMA may overwrite what they read
      __syncwarp();
    }
    arrive(shared.v_empty[v_ring.stage]);
    v_ring.advance();
  }

  // With kPingPong, row parts start their products one after the other. Left alone they fall into step, and all wait
  // for one unit.
  __device__ __forceinline__ void take_turn() const {
    if constexpr (T::kPingPong) ptx::barrier_sync(Barrier::kTurn + row_part, 256);
  }
  __device__ __forceinline__ void pass_turn() const {
    if constexpr (T::kPingPong) {
      ptx::barrier_arrive(Barrier::kTurn + (row_part + 1 == T::kRowParts ? 0 : row_part + 1), 256);
    }
  }

  // The tiles whose keys all rows attend to.
  __device__ __forceinline__ void find_ranges() {
    const auto uniform = [](int x) { return __shfl_sync(0xffffffffu, x, 0); };  // known to be: saves registers
    whole_first = uniform((rows.whole_begin + kTile - 1) / kTile);
    whole_stop = uniform(rows.whole_end / kTile);
  }

  // All tiles of a work, up to the end of P V of the last one.
  __device__ __forceinline__ void run_tiles(int tile, int stop) {
    const auto without_mask = [&](int tile) { return !T::kMaskInStep && is_whole(tile); };
    const int last_half = (rows.work.tile.key_end - 1) % kTile < kTile / 2 ? rows.work.tile.key_end / kTile : -1;
    if constexpr (!T::kOverlap) {
      while (true) {
        take_turn();
        do {
          if (without_mask(tile)) {
            step<false, false>(tile);
          } else {
            tile == last_half ? step<true, true>(tile) : step<true, false>(tile);
          }
          ++tile;
        } while (tile % (kChunk / kTile) != 0 && tile < stop);
        pass_turn();
        softmax.keep(sums);
        if (tile >= stop) return;
        end_chunk<false>((tile - 1) / (kChunk / kTile));
        softmax.start();
      }
    }
    unsigned weights[kSteps][4];
    without_mask(tile) ? overlapped_step<false, true, true>(tile, weights)
                       : overlapped_step<true, true, true>(tile, weights);
    for (++tile; tile < stop; ++tile) {
      if (tile % (kChunk / kTile) == 0) {
        without_mask(tile) ? overlapped_step<false, false, true>(tile, weights)
                           : overlapped_step<true, false, true>(tile, weights);
      } else {
        if (without_mask(tile)) {
          overlapped_step<false, false, false>(tile, weights);
        } else {
          T::kHalfTiles && tile == last_half ? overlapped_step<true, false, false, T::kHalfTiles>(tile, weights)
                                             : overlapped_step<true, false, false>(tile, weights);
        }
      }
    }
    softmax.keep(sums);
    if (!prepare_values(stop - 1)) await_values();
    take_turn();
    start_output(weights);
    pass_turn();
    ptx::wgmma_wait<0>();
    ptx::pin(o);
    release_values();
  }
  // Whether to look for keys that are masked, in code that looks for them.
  __device__ __forceinline__ bool has_mask(int tile) const { return !T::kMaskInStep || !is_whole(tile); }
  __device__ __forceinline__ bool is_whole(int tile) const { return tile >= whole_first && tile < whole_stop; }

  __device__ __forceinline__ void run() {
    if (row_part == T::kRowParts - 1) pass_turn();  // the first begins
    if constexpr (T::kQueriesAhead) await_work();
    while (begin_work()) {
      softmax.start();
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        sums.all_max[own_row() + 8 * r] = -CUDART_INF_F;
        sums.all_sum[own_row() + 8 * r] = 0.0f;
      }
#pragma unroll
      for (int i = 0; i < kOut; ++i) o[i] = 0.0f;
      begun = false;
#pragma unroll
      for (float& x : held) x = 0.0f;
      find_ranges();
      const int first = __shfl_sync(0xffffffffu, rows.work.first_tile(), 0);
      const int stop = __shfl_sync(0xffffffffu, rows.work.stop_tile(), 0);
      if (first < stop) {
        run_tiles(first, stop);
        end_chunk<true>((stop - 1) / (kChunk / kTile));
      }
      if constexpr (T::kQueriesAhead) await_work();
      __syncwarp();
      if (rows.work.whole()) {
        store(rows.work);
      } else {
        if (rows.work.begin == 0) leave(p.slots, sums.all_max, sums.all_sum);
        end_piece(plan_of(p));
      }
    }
    if (row_part == 0) take_turn();  // no turn stays untaken
    ptx::launch_dependent_grids();
    merge_pieces(plan_of(p));
  }
};

}  // namespace greenfast::serving

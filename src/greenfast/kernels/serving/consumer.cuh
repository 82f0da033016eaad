// A consumer warpgroup and its 64 rows: the main loop over tiles of keys, in which P V of a tile runs during the softmax
// of the next, and the sums over chunks.
#pragma once

#include <math_constants.h>

#include "attention/epilogue.cuh"
#include "attention/sm90/traits.cuh"
#include "ptx/barrier.cuh"
#include "ptx/griddepcontrol.cuh"
#include "ptx/store.cuh"
#include "ptx/wgmma.cuh"
#include "serving/merge.cuh"
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
struct Consumer : Results<T> {
  using Base = Results<T>;
  using Base::end_piece, Base::merge_pieces;
  using Base::kThreads, Base::p, Base::rows, Base::shared;
  using Base::out_row, Base::pair, Base::partial, Base::partial_rows, Base::unit_of;
  using typename Base::Finish;
  static constexpr int kScores = Softmax<T>::kScores, kSteps = Softmax<T>::kSteps, kOut = T::kColumns / 2;

  Sums& sums;
  const int row_part, column_part;
  const ptx::Operand<T::kPanel> q_tile, k_tiles;
  const ValueOperand<T> v_tiles;
  Ring<T::kStages> k_ring, v_ring;
  Ring<T::kFactorStages> factors_ring;
  unsigned q_parity = 0;

  float o[kOut];                            // of the present chunk
  Softmax<T> softmax;                       // the same
  float held[T::kHeld > 0 ? T::kHeld : 1];  // of the sums over the chunks before it
  bool begun;                               // whether there is such a chunk
  int whole_first, whole_stop;              // tiles whose keys all rows attend to
  int clear_first, clear_last;              // tiles of whose values some are to be cleared, or -1

  __device__ __forceinline__ Consumer(const AttentionParams& p, Storage<T>& shared, int warpgroup)
      : Base{p, shared, shared.rows[warpgroup / T::kColumnParts]},
        sums(shared.sums[warpgroup]),
        row_part(warpgroup / T::kColumnParts),
        column_part(warpgroup % T::kColumnParts),
        q_tile(shared.q[row_part]),
        k_tiles(shared.k),
        v_tiles(shared.v[0][0] + column_part * T::kColumns * 16) {}

  __device__ __forceinline__ static void arrive(ptx::Mbarrier& barrier) {
    if (threadIdx.x % 32 == 0) barrier.arrive();
  }
  __device__ __forceinline__ void sync_rows() const { ptx::barrier_sync(Barrier::kRows + row_part, T::kRowThreads); }

  // The next work: whether there is any, what its rows attend to, and their Q, quantized.
  __device__ __forceinline__ bool begin_work() {
    sync_rows();  // the last work is over
    shared.q_full.wait(q_parity);
    q_parity ^= 1;
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

  __device__ __forceinline__ void start_scores(float (&s)[kScores]) {
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

  __device__ __forceinline__ void start_output(const unsigned (&weights)[kSteps][4]) {
    const auto v_tile = stage_of<sizeof(shared.v[0])>(v_tiles, v_ring.stage);
    ptx::wgmma_fence();
#pragma unroll
    for (int t = 0; t < kSteps; ++t) ptx::wgmma_add(o, weights[t], v_tile.at(2 * t * T::kGroupBytes));
    ptx::wgmma_commit();
  }

  // Registers 4 i to 4 i + 3 of O, summed over the chunks that have ended.
  __device__ __forceinline__ float4& shared_total(int i) const {
    constexpr int kShared = (kOut - T::kHeld) / 4;
    return shared.totals[threadIdx.x / 128 * kShared + i - T::kHeld / 4][threadIdx.x % 128];
  }
  __device__ __forceinline__ float4 total(int i) const {
    if (4 * i >= T::kHeld) return shared_total(i);
    return make_float4(held[4 * i], held[4 * i + 1], held[4 * i + 2], held[4 * i + 3]);
  }
  __device__ __forceinline__ void set_total(int i, const float4& x) {
    if (4 * i >= T::kHeld) {
      shared_total(i) = x;
    } else {
      held[4 * i] = x.x;
      held[4 * i + 1] = x.y;
      held[4 * i + 2] = x.z;
      held[4 * i + 3] = x.w;
    }
  }

  // Adds a chunk, whose O is in `o`, to those before it; or leaves it as a partial result. chunk: of the sequence.
  // kLast: of the work, whose result is then in `o`.
  template <bool kLast>
  __device__ __forceinline__ void end_chunk(int chunk) {
    if (rows.work.begin > 0) {
      leave(chunk - rows.work.tile.first_chunk() - rows.work.begin, sums.max, sums.sum);
    } else {
      float before[2], after[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int at = own_row() + 8 * r;
        float top = sums.all_max[at];
        const Merge merge(top, sums.max[at]);
        const float total = merge(sums.all_sum[at], sums.sum[at]);
        __syncwarp();
        sums.all_max[at] = top;
        sums.all_sum[at] = total;
        before[r] = merge.before;
        after[r] = merge.after;
      }
      if (!T::kSharedTotals || begun) {
#pragma unroll
        for (int i = 0; i < kOut / 4; ++i) {
          const float4 x = total(i);
          o[4 * i] = Merge::of(x.x, before[0], o[4 * i], after[0]);
          o[4 * i + 1] = Merge::of(x.y, before[0], o[4 * i + 1], after[0]);
          o[4 * i + 2] = Merge::of(x.z, before[1], o[4 * i + 2], after[1]);
          o[4 * i + 3] = Merge::of(x.w, before[1], o[4 * i + 3], after[1]);
          if constexpr (!kLast) set_total(i, make_float4(o[4 * i], o[4 * i + 1], o[4 * i + 2], o[4 * i + 3]));
        }
      } else {
#pragma unroll
        for (int i = 0; i < kOut; ++i) o[i] += 0.0f;  // -0 becomes 0, as in the sum with what came before
        if constexpr (!kLast) {
#pragma unroll
          for (int i = 0; i < kOut / 4; ++i) {
            set_total(i, make_float4(o[4 * i], o[4 * i + 1], o[4 * i + 2], o[4 * i + 3]));
          }
        }
      }
      begun = true;
    }
    if constexpr (!kLast) {
#pragma unroll
      for (float& x : o) x = 0.0f;
    }
  }

  // Leaves what is in `o`.
  __device__ __forceinline__ void leave(int slot, const float (&of_max)[64], const float (&of_sum)[64]) const {
    float* const to = partial(blockIdx.x * (p.slots + 1) + min(slot, p.slots));  // more only with a wrong plan
    const int stop = partial_rows(rows.work.tile), quad = threadIdx.x % 4;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int at = row_part * 64 + own_row() + 8 * r;
      if (at >= stop) continue;
      float* const out = to + at * T::kHeadDim + column_part * T::kColumns + 2 * quad;
#pragma unroll
      for (int j = 0; j < T::kColumns / 8; ++j) {
        *reinterpret_cast<float2*>(out + 8 * j) = make_float2(o[4 * j + 2 * r], o[4 * j + 2 * r + 1]);
      }
      if (quad == 0 && column_part == 0) {
        to[p.slot_rows * T::kHeadDim + at] = of_max[own_row() + 8 * r];
        to[p.slot_rows * (T::kHeadDim + 1) + at] = of_sum[own_row() + 8 * r];
      }
    }
  }

  // Writes the rows of a tile that this block has worked on alone.
  __device__ __forceinline__ void store(const Work& work) {
    const int stop = work.tile.rows(T::kRows, p.batch.group), quad = threadIdx.x % 4;
    const float unit = T::kScalesAhead ? rows.unit : unit_of(work);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int of_part = own_row() + 8 * r, at = row_part * 64 + of_part;
      const bool valid = at < stop;
      const Finish finish(p, work, min(at, stop - 1), sums.all_max[of_part], sums.all_sum[of_part],
                          valid && quad == 0 && column_part == 0, unit);
      typename T::Out* const out = out_row(work, min(at, stop - 1)) + column_part * T::kColumns;
#pragma unroll
      for (int j = 0; j < T::kColumns / 8; j += 4) {
        unsigned x[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          x[i] = pair(finish(o[4 * (j + i) + 2 * r]), finish(o[4 * (j + i) + 2 * r + 1]));
        }
        transpose_quad(x);
        if (valid) ptx::store_16(out + 8 * (j + quad), x);
      }
    }
  }

  // One tile: its scores, after which P V of the tile before it runs, and its weights. Values are waited for once the
  // scores have started: with one stage they come later than the keys. kNew: it is the first of a chunk.
  template <bool kMasked, bool kFirst, bool kNew>
  __device__ __forceinline__ void step(int tile, unsigned (&weights)[kSteps][4]) {
    float s[kScores], rescale[2];
    const int stage = k_ring.stage;
    shared.k_full[stage].wait(k_ring.parity);
    bool awaited = true;
    if constexpr (!kFirst) awaited = prepare_values(tile - 1);
    take_turn();
    start_scores(s);
    if constexpr (!kFirst) {
      if (!awaited) await_values();  // without the condition the compiler spills, and waits after each product (C7511)
      start_output(weights);
    }
    pass_turn();
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
    softmax.template weigh<kMasked>(s, p, rows, factors, tile * kTile, rescale);
    if constexpr (!kFirst) {
      ptx::wgmma_wait<0>();
      ptx::pin(o);
      release_values();
    }
    softmax.pack(s, weights);  // not before: P V was reading them
    if constexpr (!kFirst) {
      if constexpr (kNew) {
        end_chunk<false>((tile - 1) / (kChunk / kTile));
      } else if (__any_sync(0xffffffffu, rescale[0] != 1.0f || rescale[1] != 1.0f)) {
#pragma unroll
        for (int i = 0; i < kOut; ++i) o[i] *= rescale[i / 2 % 2];
      }
    }
  }

  __device__ __forceinline__ void await_values() const { shared.v_full[v_ring.stage].wait(v_ring.parity); }
  // Turns or clears values of a tile, where that is to be done; says whether it was, and they were waited for. All
  // consumers meet for it, so none has its turn.
  __device__ __forceinline__ bool prepare_values(int tile) {
    constexpr bool kTurns = T::kTurnsValues && !T::kTurnsAhead;
    const bool clears = tile == clear_first || tile == clear_last;
    if (kTurns || clears) await_values();
    if constexpr (kTurns) {
      turn_stage<T, 4 * T::kConsumers>(shared.v[v_ring.stage][0], threadIdx.x / 32);
      ptx::barrier_sync(Barrier::kConsumers, kThreads);
    }
    if (clears) {
      const int first = rows.work.tile.key_begin - tile * kTile, stop = rows.work.tile.key_end - tile * kTile;
      T::kRowValues && !T::kTurnsValues ? clear_rows(shared, v_ring, first, stop)
                                        : clear_values(shared, v_ring, first, stop);
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

  // Two row parts start their products one after the other. Left alone they fall into step, and both wait for one unit;
  // three do not.
  __device__ __forceinline__ void take_turn() const {
    if constexpr (T::kRowParts == 2) ptx::barrier_sync(Barrier::kTurn + row_part, 256);
  }
  __device__ __forceinline__ void pass_turn() const {
    if constexpr (T::kRowParts == 2) ptx::barrier_arrive(Barrier::kTurn + (1 - row_part), 256);
  }

  // The tiles whose keys all rows attend to, and the tiles in which some values are to be cleared.
  __device__ __forceinline__ void find_ranges() {
    const auto uniform = [](int x) { return __shfl_sync(0xffffffffu, x, 0); };  // known to be: saves registers
    const int begin = rows.work.tile.key_begin, end = rows.work.tile.key_end;
    whole_first = uniform((rows.whole_begin + kTile - 1) / kTile);
    whole_stop = uniform(rows.whole_end / kTile);
    clear_first = uniform(begin % kTile != 0 ? begin / kTile : -1);
    clear_last = uniform(end % kTile != 0 ? end / kTile : -1);
  }

  // All tiles of a work, up to the end of P V of the last one.
  __device__ __forceinline__ void run_tiles(int tile, int stop) {
    unsigned weights[kSteps][4];
    is_whole(tile) ? step<false, true, true>(tile, weights) : step<true, true, true>(tile, weights);
    for (++tile; tile < stop; ++tile) {
      if (tile % (kChunk / kTile) == 0) {
        is_whole(tile) ? step<false, false, true>(tile, weights) : step<true, false, true>(tile, weights);
      } else {
        is_whole(tile) ? step<false, false, false>(tile, weights) : step<true, false, false>(tile, weights);
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
  __device__ __forceinline__ bool is_whole(int tile) const { return tile >= whole_first && tile < whole_stop; }

  __device__ __forceinline__ void run() {
    if (row_part == T::kRowParts - 1) pass_turn();  // the first begins
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
      int tile = __shfl_sync(0xffffffffu, rows.work.first_tile(), 0);
      const int stop = __shfl_sync(0xffffffffu, rows.work.stop_tile(), 0);
      if (tile < stop) {
        run_tiles(tile, stop);
        end_chunk<true>((stop - 1) / (kChunk / kTile));
      }
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

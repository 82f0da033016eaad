// Results over different keys of the same rows: how two become one, where partial ones are left, how those of a row tile
// that several blocks have worked on are merged, and what makes O and the log-sum-exp of a result over all keys.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <math_constants.h>

#include "ptx/barrier.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/math.cuh"
#include "serving/traits.cuh"

namespace greenfast::serving {

// How the results of two runs of keys, of which the second comes later, become one: by factors of both.
struct Merge {
  float before, after;
  // max: of the first, and then of both.
  __device__ __forceinline__ Merge(float& max, float next_max) {
    const float top = fmaxf(max, next_max), base = top == -CUDART_INF_F ? 0.0f : top;
    before = ptx::ex2(max - base);
    after = ptx::ex2(next_max - base);
    max = top;
  }
  // Of O, and of the sums of weights.
  __device__ __forceinline__ float operator()(float x, float next) const { return of(x, before, next, after); }
  __device__ __forceinline__ static float of(float x, float before, float next, float after) {
    return __fmaf_rn(x, before, __fmul_rn(next, after));
  }
};

// Those of a consumer warpgroup's rows. An aggregate: with a constructor here the machine code is another one.
template <class T>
struct Results {
  static constexpr int kThreads = T::kConsumerThreads;

  const AttentionParams& p;
  Storage<T>& shared;
  Rows& rows;

  // A partial result: O of slot_rows rows, their maxima, their sums.
  __device__ __forceinline__ float* partial(int slot) const {
    return p.partials + static_cast<long long>(slot) * p.slot_rows * (T::kHeadDim + 2);
  }

  // A sequence with more queries than was said has more rows than there is memory for: they are left out.
  __device__ __forceinline__ int partial_rows(const RowTile& tile) const {
    return min(tile.rows(T::kRows, p.batch.group), p.slot_rows);
  }

  // What one of O's numbers stands for, of a work.
  __device__ __forceinline__ float unit_of(const Work& work) const {
    if constexpr (T::kTokenScales) return 1.0f;
    return p
        .v_scale[static_cast<long long>(work.tile.sequence) * p.v_scale_strides[0] + work.head * p.v_scale_strides[1]];
  }

  // A row's factor of O, and its log-sum-exp if asked for, from the maximum and sum over all keys.
  struct Finish {
    float before, factor;  // O is multiplied by one, which without sinks is 1, then by the other
    __device__ __forceinline__ Finish(const AttentionParams& p, const Work& work, int row, float max, float sum,
                                      bool writes, float unit) {
      const int packed = work.tile.first_row + row, of_tile = p.batch.token(packed);
      const int head = work.head * p.batch.group + packed - of_tile * p.batch.group;
      const int token = work.tile.q_begin + of_tile;
      before = 1.0f;
      if (p.sinks != nullptr) {
        const Merge merge(max, p.sinks[head] * kLog2E);
        sum = merge(sum, 56.0f);
        before = merge.before;
      }
      const bool any = sum > 0.0f || sum != sum;
      factor = any ? unit / sum : 0.0f;
      if (p.lse != nullptr && writes) {
        p.lse[static_cast<long long>(head) * p.tokens + token] =
            any ? (log2f(sum) - kOffset + max) * kLn2 : -CUDART_INF_F;
      }
    }
    __device__ __forceinline__ float operator()(float x) const { return x * before * factor; }
  };

  __device__ __forceinline__ typename T::Out* out_row(const Work& work, int row) const {
    const int packed = work.tile.first_row + row, group = p.batch.group, of_tile = p.batch.token(packed);
    const long long token = work.tile.q_begin + of_tile;
    return static_cast<typename T::Out*>(p.out) +
           ((token * p.kv_heads + work.head) * group + packed - of_tile * group) * T::kHeadDim;
  }

  __device__ __forceinline__ static unsigned pair(float low, float high) {
    typename T::Out two[2] = {static_cast<typename T::Out>(low), static_cast<typename T::Out>(high)};
    return reinterpret_cast<const unsigned&>(two);
  }

  // Where several blocks work on a row tile: says that this one has left its part, for merge_pieces.
  __device__ __forceinline__ void end_piece(const Plan& plan) {
    __threadfence();
    ptx::barrier_sync(Barrier::kConsumers, kThreads);
    if (threadIdx.x == 0) {
      const Work& work = rows.work;
      atomicAdd(plan.done(work.index, work.head, p.kv_heads), work.end - work.begin);
      shared.pieces[shared.piece_count++] = work;
    }
  }

  // Once a block has no more work: merges the results of the row tiles that it shares, each block a part of the
  // columns. All blocks are resident, so each waits for a short time, for those that end later.
  __device__ __forceinline__ void merge_pieces(const Plan& plan) {
    ptx::barrier_sync(Barrier::kConsumers, kThreads);
    for (int i = 0; i < shared.piece_count; ++i) merge_piece(shared.pieces[i], plan);
  }

  // Results that are merged at a time, in the memory of tiles: of a run of elements, which are four columns of a row.
  struct Staged {
    static constexpr int kElements = 512, kResults = 256, kValues = 2048, kEntries = 512, kRows = 40;
    float4 values[kValues];                                    // [result][element]
    float2 factors[kEntries];                                  // [row][result]: of what came before, and of the result
    float max[kEntries], sum[kEntries];                        // [row][result]
    float o[4 * kElements], total[4 * kElements], top[kRows];  // so far
    int slots[kResults];
  };

  __device__ __forceinline__ void merge_piece(const Work& work, const Plan& plan) {
    constexpr int kParts = T::kHeadDim / 4;
    static_assert(sizeof(Staged) <= sizeof(shared.k) + sizeof(shared.v), "tiles are over, their memory is free");
    Staged& staged = *reinterpret_cast<Staged*>(shared.k);
    const auto sync = [] { ptx::barrier_sync(Barrier::kConsumers, kThreads); };
    int* const done = plan.done(work.index, work.head, p.kv_heads);
    // Result 0 is the first block's, of all of its chunks; the others are of a chunk each.
    const int first_unit = work.tile.first_unit + work.head / plan.abreast * work.chunks;
    const int units = plan.units(), runs = plan.runs(), run = blockIdx.x / plan.abreast;
    const int first_run = Plan::run_of(first_unit, runs, units);
    const int next_unit = Plan::begin_of(first_run + 1, runs, units),
              results = first_unit + work.chunks - next_unit + 1;
    const int blocks = Plan::run_of(first_unit + work.chunks - 1, runs, units) - first_run + 1;
    const auto slot_of = [&](int result) {
      const int unit = next_unit + result - 1, of = result == 0 ? first_run : Plan::run_of(unit, runs, units);
      const int block = of * plan.abreast + blockIdx.x % plan.abreast;
      return block * (p.slots + 1) + (result == 0 ? p.slots : min(unit - Plan::begin_of(of, runs, units), p.slots));
    };
    const auto list_slots = [&](int begin) {
      for (int i = threadIdx.x; i < min(results - begin, Staged::kResults); i += kThreads) {
        staged.slots[i] = slot_of(begin + i);
      }
    };
    list_slots(0);
    int listed = 0;  // the first result whose slot is listed
    const float unit = unit_of(work);
    if (threadIdx.x == 0) {
      while (*static_cast<volatile int*>(done) < work.chunks) __nanosleep(32);
      __threadfence();
    }
    const int elements = partial_rows(work.tile) * kParts, rank = run - first_run;
    const int stop = (rank + 1) * elements / blocks;
    for (int first = rank * elements / blocks; first < stop; first += Staged::kElements) {
      const int count = min(stop - first, Staged::kElements), at_once = min(Staged::kValues / count, Staged::kResults);
      const int first_row = first / kParts, rows = (first + count - 1) / kParts - first_row + 1;
      for (int begin = 0; begin < results; begin += at_once) {
        const int now = min(results - begin, at_once);
        if (begin < listed || begin + now > listed + Staged::kResults) {
          sync();
          list_slots(begin);
          listed = begin;
        }
        sync();
        const int* const slots = staged.slots + begin - listed;
        fetch_results(staged, slots, first, count, now);
        const int entries = rows * now;
        for (int i = threadIdx.x; i < entries; i += kThreads) {
          const int row = i / now;
          const float* const from = partial(slots[i - row * now]) + p.slot_rows * T::kHeadDim + first_row + row;
          staged.max[i] = __ldcg(from);
          staged.sum[i] = __ldcg(from + p.slot_rows);
        }
        ptx::cp_async_wait<0>();
        sync();
        for (int row = threadIdx.x / 32; row < rows; row += kThreads / 32) {
          find_factors(staged.max + row * now, staged.factors + row * now, now, begin == 0, staged.top[row]);
        }
        sync();
        merge_results(staged, work, first, count, now, begin == 0, begin + now == results, unit);
      }
      sync();
    }
    if (threadIdx.x == 0 && atomicAdd(done + 1, 1) == blocks - 1) done[0] = done[1] = 0;  // for the plan's next launch
  }

  // Starts copying elements first .. first + count - 1 of the results in these slots.
  __device__ __forceinline__ void fetch_results(Staged& staged, const int* slots, int first, int count,
                                                int results) const {
    const int step_results = kThreads / count, step = kThreads % count;
    int result = threadIdx.x / count, element = threadIdx.x % count;
    while (result < results) {
      const float* const from = partial(slots[result]) + 4 * (first + element);
      ptx::cp_async_16(&staged.values[result * count + element], from, 16);
      result += step_results;
      element += step;
      if (element >= count) {
        element -= count;
        ++result;
      }
    }
    ptx::cp_async_commit();
  }

  // By a warp: the factors of a row's results, whose maxima are given, and the maximum with those before them.
  __device__ __forceinline__ static void find_factors(const float* maxima, float2* factors, int results, bool begins,
                                                      float& top) {
    const int lane = threadIdx.x % 32;
    float before = begins ? -CUDART_INF_F : top;
    for (int begin = 0; begin < results; begin += 32) {
      const float mine = begin + lane < results ? maxima[begin + lane] : -CUDART_INF_F;
      float most = mine;  // up to this lane's
#pragma unroll
      for (int step = 1; step < 32; step *= 2) {
        const float other = __shfl_up_sync(0xffffffffu, most, step);
        most = lane >= step ? fmaxf(most, other) : most;
      }
      const float other = __shfl_up_sync(0xffffffffu, most, 1);
      float up_to = lane > 0 ? fmaxf(before, other) : before;
      const Merge merge(up_to, mine);
      if (begin + lane < results) factors[begin + lane] = make_float2(merge.before, merge.after);
      before = fmaxf(before, __shfl_sync(0xffffffffu, most, 31));
    }
    __syncwarp();
    if (lane == 0) top = before;
  }

  // Merges results in order, a number of O in each thread; the last ones complete the output.
  __device__ __forceinline__ void merge_results(Staged& staged, const Work& work, int first, int count, int results,
                                                bool begins, bool ends, float unit) const {
    constexpr int kParts = T::kHeadDim / 4;
    const float* const values = reinterpret_cast<const float*>(staged.values);
    for (int i = threadIdx.x; i - static_cast<int>(threadIdx.x % 32) < 4 * count; i += kThreads) {
      const int at = min(i, 4 * count - 1), element = first + at / 4, row = element / kParts;
      const int entry = (row - first / kParts) * results;
      float x = begins ? 0.0f : staged.o[at], total = begins ? 0.0f : staged.total[at];
#pragma unroll 8
      for (int u = 0; u < results; ++u) {
        const float2 factors = staged.factors[entry + u];
        x = Merge::of(x, factors.x, values[u * 4 * count + at], factors.y);
        total = Merge::of(total, factors.x, staged.sum[entry + u], factors.y);
      }
      if (!ends) {
        if (i == at) {
          staged.o[at] = x;
          staged.total[at] = total;
        }
        continue;
      }
      const int column = element % kParts * 4 + at % 4;
      const Finish finish(p, work, row, staged.top[row - first / kParts], total, i == at && column == 0, unit);
      x = finish(x);
      const float next = __shfl_down_sync(0xffffffffu, x, 1);
      if (i == at && i % 2 == 0) *reinterpret_cast<unsigned*>(out_row(work, row) + column) = pair(x, next);
    }
  }
};

}  // namespace greenfast::serving

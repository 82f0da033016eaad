// Results over different keys of the same rows: how two become one, where partial ones are left, how those of a row tile
// that several blocks have worked on are merged, and what makes O and the log-sum-exp of a result over all keys.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <math_constants.h>

#include "ptx/atomic.cuh"
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
    const Work& work = rows.work;
    unsigned* const done = plan.done(work.index, work.head, p.kv_heads);
    ptx::barrier_sync(Barrier::kConsumers, kThreads);
    if (threadIdx.x == 0) {
      ptx::add_release(done, work.end - work.begin);
      if constexpr (!T::kWorksApart) shared.pieces[shared.piece_count++].find(plan, work);
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
    float4 values[kValues];                                       // [result][element]
    alignas(16) float before[kEntries], after[kEntries];          // [row][result]: factors, as of Merge
    float max[kEntries], sum[kEntries];                           // [row][result]
    alignas(16) float merged[4 * kElements + kRows], top[kRows];  // so far: O, and the sums of rows; maxima of rows
    int places[kResults];                                         // of results in p.partials, in 16 bytes
  };

  __device__ __forceinline__ void merge_piece(const Piece& piece, const Plan& plan) {
    constexpr int kParts = T::kHeadDim / 4;
    static_assert(sizeof(Staged) <= sizeof(shared.k) + sizeof(shared.v), "tiles are over, their memory is free");
    Staged& staged = *reinterpret_cast<Staged*>(shared.k);
    const auto sync = [] { ptx::barrier_sync(Barrier::kConsumers, kThreads); };
    const Work& work = piece.work;
    const int results = piece.results, blocks = piece.blocks;
    const int warp = threadIdx.x / 32, result_step = p.slot_rows * (T::kHeadDim + 2) / 4;
    // By all but the first warp, of which a thread waits meanwhile.
    const auto list_results = [&](int begin) {
      if (threadIdx.x < 32) return;
      for (int i = threadIdx.x - 32; i < min(results - begin, Staged::kResults); i += kThreads - 32) {
        staged.places[i] = piece.slot(begin + i, p.slots) * result_step;
      }
    };
    list_results(0);
    int listed = 0;  // the first result whose place is listed
    const float unit = unit_of(work);
    unsigned* const done = plan.done(work.index, work.head, p.kv_heads);
    bool all_done = false;
    const auto await_all = [&] {
      if (threadIdx.x == 0) {
        const unsigned parts = work.chunks;
        while (ptx::load_acquire(done) < parts) {
        }
        ptx::increment(done, parts + blocks - 1);
      }
      all_done = true;
    };
    const int elements = partial_rows(work.tile) * kParts, rank = piece.run - piece.first_run;
    const int stop = (rank + 1) * elements / blocks;
    for (int first = rank * elements / blocks; first < stop; first += Staged::kElements) {
      const int count = min(stop - first, Staged::kElements), at_once = min(Staged::kValues / count, Staged::kResults);
      const int first_row = first / kParts, rows = (first + count - 1) / kParts - first_row + 1;
      // Of the results one after the other, a thread copies an element, and then those that are kThreads further on.
      const int first_result = threadIdx.x / count, first_element = threadIdx.x % count;
      const int step_results = kThreads / count, step = kThreads % count;
      for (int begin = 0; begin < results; begin += at_once) {
        const int now = min(results - begin, at_once), row_step = (now + 3) / 4 * 4;
        if (begin < listed || begin + now > listed + Staged::kResults) {
          sync();
          list_results(begin);
          listed = begin;
        }
        if (!all_done) await_all();  // not before the above is found, which takes as long as a part's end to be seen
        sync();
        const int* const places = staged.places + begin - listed;
        const float4* const partials = reinterpret_cast<const float4*>(p.partials);
        // Maxima first, as factors take longer than what they are for.
        for (int row = warp; row < rows; row += kThreads / 32) {
          for (int result = threadIdx.x % 32; result < now; result += 32) {
            const int entry = row * row_step + result;
            const float* const from = reinterpret_cast<const float*>(partials + places[result]) +
                                      (p.slot_rows * T::kHeadDim + first_row + row);
            ptx::cp_async_4(&staged.max[entry], from);
            ptx::cp_async_4(&staged.sum[entry], from + p.slot_rows);
          }
        }
        ptx::cp_async_commit();
        for (int result = first_result, element = first_element; result < now;) {
          ptx::cp_async_16(&staged.values[result * count + element], partials + places[result] + (first + element), 16);
          result += step_results;
          element += step;
          if (element >= count) {
            element -= count;
            ++result;
          }
        }
        ptx::cp_async_commit();
        ptx::cp_async_wait<1>();
        __syncwarp();
        for (int row = warp; row < rows; row += kThreads / 32) {
          find_factors(staged, row * row_step, now, begin == 0, staged.top[row]);
        }
        ptx::cp_async_wait<0>();
        sync();
        merge_results(staged, first, count, rows, now, row_step, begin == 0);
      }
      sync();
      write_output(staged, work, first, count, unit);
    }
    if (!all_done) await_all();  // with more blocks than elements
  }

  // By a warp: the factors of a row's results, which begin at an entry, and the maximum with those before them. A lane
  // has some neighbouring ones: an odd number, so that lanes read different banks.
  __device__ __forceinline__ static void find_factors(Staged& staged, int entry, int results, bool begins, float& top) {
    constexpr int kMost = Staged::kResults / 32 | 1;
    const int lane = threadIdx.x % 32, own = (results + 31) / 32 | 1;
    const int first = lane * own, count = min(own, results - first);
    float maxima[kMost], most = -CUDART_INF_F;  // most: up to this lane's last
#pragma unroll
    for (int i = 0; i < kMost; ++i) {
      if (i < count) maxima[i] = staged.max[entry + first + i];
    }
#pragma unroll
    for (int i = 0; i < kMost; ++i) {
      if (i < count) most = fmaxf(most, maxima[i]);
    }
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const float other = __shfl_up_sync(0xffffffffu, most, step);
      most = lane >= step ? fmaxf(most, other) : most;
    }
    const float before = begins ? -CUDART_INF_F : top, others = __shfl_up_sync(0xffffffffu, most, 1);
    float max = lane > 0 ? fmaxf(before, others) : before;
#pragma unroll
    for (int i = 0; i < kMost; ++i) {
      if (i >= count) break;
      const Merge merge(max, maxima[i]);
      staged.before[entry + first + i] = merge.before;
      staged.after[entry + first + i] = merge.after;
    }
    __syncwarp();
    if (lane == 31) top = fmaxf(before, most);
  }

  // Merges results in order: a number of O, or the sum of a row, in each thread.
  __device__ __forceinline__ static void merge_results(Staged& staged, int first, int count, int rows, int results,
                                                       int row_step, bool begins) {
    constexpr int kParts = T::kHeadDim / 4, kTogether = 16;
    for (int i = threadIdx.x; i < 4 * count + rows; i += kThreads) {
      const bool is_sum = i >= 4 * count;
      const int row = is_sum ? i - 4 * count : (first + i / 4) / kParts - first / kParts, entry = row * row_step;
      const int step = is_sum ? 1 : 4 * count;
      const float* from = is_sum ? staged.sum + entry : reinterpret_cast<const float*>(staged.values) + i;
      float x = begins ? 0.0f : staged.merged[i];
      int u = 0;
      for (; u + kTogether <= results; u += kTogether) {
        float before[kTogether], after[kTogether], next[kTogether];
#pragma unroll
        for (int v = 0; v < kTogether; v += 4) {
          reinterpret_cast<float4&>(before[v]) = *reinterpret_cast<const float4*>(staged.before + entry + u + v);
          reinterpret_cast<float4&>(after[v]) = *reinterpret_cast<const float4*>(staged.after + entry + u + v);
        }
#pragma unroll
        for (int v = 0; v < kTogether; ++v, from += step) next[v] = *from;
#pragma unroll
        for (int v = 0; v < kTogether; ++v) x = Merge::of(x, before[v], next[v], after[v]);
      }
#pragma unroll 4
      for (; u < results; ++u, from += step) {
        x = Merge::of(x, staged.before[entry + u], *from, staged.after[entry + u]);
      }
      staged.merged[i] = x;
    }
  }

  // Completes the output of elements that all results were merged to.
  __device__ __forceinline__ void write_output(const Staged& staged, const Work& work, int first, int count,
                                               float unit) const {
    constexpr int kParts = T::kHeadDim / 4;
    for (int i = threadIdx.x; i < count; i += kThreads) {
      const int row = (first + i) / kParts, column = (first + i) % kParts * 4, of_row = row - first / kParts;
      const float* const x = staged.merged + 4 * i;
      const Finish finish(p, work, row, staged.top[of_row], staged.merged[4 * count + of_row], column == 0, unit);
      *reinterpret_cast<uint2*>(out_row(work, row) + column) =
          make_uint2(pair(finish(x[0]), finish(x[1])), pair(finish(x[2]), finish(x[3])));
    }
  }
};

}  // namespace greenfast::serving

// Merging of partial results (O, row maxima and row sums of the same rows over different keys), and the finalization of
// O and LSE.
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

// Merges the results of two consecutive key ranges: the factors of both (log-sum-exp rule with running maximum).
struct Merge {
  float before, after;
  // max: in: of the first range; out: of both.
  __device__ __forceinline__ Merge(float& max, float next_max) {
    const float row_max = fmaxf(max, next_max), base = row_max == -CUDART_INF_F ? 0.0f : row_max;
    before = ptx::ex2(max - base);
    after = ptx::ex2(next_max - base);
    max = row_max;
  }
  // Applies to O and to row sums.
  __device__ __forceinline__ float operator()(float x, float next) const { return of(x, before, next, after); }
  __device__ __forceinline__ static float of(float x, float before, float next, float after) {
    return __fmaf_rn(x, before, __fmul_rn(next, after));
  }
};

// Results of a consumer warpgroup's rows. An aggregate: a constructor here changes the machine code.
template <class T>
struct Results {
  static constexpr int kThreads = T::kConsumerThreads;

  const AttentionParams& p;
  Storage<T>& shared;
  Rows& rows;

  // The address of a partial result: O of slot_rows rows, then their maxima, then their sums.
  __device__ __forceinline__ float* partial(int slot) const {
    return p.partials + static_cast<long long>(slot) * p.slot_rows * (T::kHeadDim + 2);
  }

  // Rows of a partial result. Rows beyond slot_rows (a sequence longer than max_q_len) are dropped.
  __device__ __forceinline__ int partial_rows(const RowTile& tile) const {
    return min(tile.rows(T::kRows, p.batch.group), p.slot_rows);
  }

  // The scale of V that O is multiplied by; 1 with kTokenScales, where P contains it.
  __device__ __forceinline__ float v_scale_of(const Work& work) const {
    if constexpr (T::kTokenScales) return 1.0f;
    return p
        .v_scale[static_cast<long long>(work.tile.sequence) * p.v_scale_strides[0] + work.head * p.v_scale_strides[1]];
  }

  // Finalizes a row: computes the factor for O from the maximum and sum over all keys, and writes the row's LSE if
  // p.lse is set and `writes`.
  struct RowFinalizer {
    float before, factor;  // O * before * factor; before is 1 without sinks
    __device__ __forceinline__ RowFinalizer(const AttentionParams& p, const Work& work, int row, float max, float sum,
                                            bool writes, float v_scale) {
      const int packed = work.tile.first_row + row, seq_token = p.batch.token(packed);
      const int head = work.head * p.batch.group + packed - seq_token * p.batch.group;
      const int token = work.tile.q_begin + seq_token;
      before = 1.0f;
      if (p.sinks != nullptr) {
        const Merge merge(max, p.sinks[head] * kLog2E);
        sum = merge(sum, 56.0f);
        before = merge.before;
      }
      const bool any = sum > 0.0f || sum != sum;
      factor = any ? v_scale / sum : 0.0f;
      if (p.lse != nullptr && writes) {
        p.lse[static_cast<long long>(head) * p.tokens + token] =
            any ? (log2f(sum) - kMaxOffset + max) * kLn2 : -CUDART_INF_F;
      }
    }
    __device__ __forceinline__ float operator()(float x) const { return x * before * factor; }
  };

  __device__ __forceinline__ typename T::Out* out_row(const Work& work, int row) const {
    const int packed = work.tile.first_row + row, group = p.batch.group, seq_token = p.batch.token(packed);
    const long long token = work.tile.q_begin + seq_token;
    return static_cast<typename T::Out*>(p.out) +
           ((token * p.kv_heads + work.head) * group + packed - seq_token * group) * T::kHeadDim;
  }

  __device__ __forceinline__ static unsigned pair(float low, float high) {
    typename T::Out two[2] = {static_cast<typename T::Out>(low), static_cast<typename T::Out>(high)};
    return reinterpret_cast<const unsigned&>(two);
  }

  // Signals that this block has written its split of a row tile; combine_splits waits for it.
  __device__ __forceinline__ void signal_split_done(const Plan& plan) {
    const Work& work = rows.work;
    unsigned* const done = plan.done(work.index, work.head, p.kv_heads);
    ptx::barrier_sync(Barrier::kConsumers, kThreads);
    if (threadIdx.x == 0) {
      ptx::add_release(done, work.end - work.begin);
      if constexpr (!T::kSchedulerWarp) shared.split_works[shared.split_count++].find(plan, work);
    }
  }

  // Combines the split row tiles that this block contributed to; each contributing block computes a part of the
  // elements. Called when a block has no more work. All blocks of the grid are resident, so the wait for others is
  // short.
  __device__ __forceinline__ void combine_splits(const Plan& plan) {
    ptx::barrier_sync(Barrier::kConsumers, kThreads);
    for (int i = 0; i < shared.split_count; ++i) combine_split(shared.split_works[i], plan);
  }

  // Shared memory of the combine, in place of the K and V stages: a batch of results for a range of elements. An
  // element is four columns of a row.
  struct CombineStorage {
    static constexpr int kElements = 512, kResults = 256, kValues = 2048, kEntries = 512, kRows = 40;
    float4 values[kValues];                                           // [result][element]
    alignas(16) float before[kEntries], after[kEntries];              // [row][result]: the factors of Merge
    float max[kEntries], sum[kEntries];                               // [row][result]
    alignas(16) float merged[4 * kElements + kRows], row_max[kRows];  // merged so far: O and row sums; row maxima
    int offsets[kResults];  // of the results in p.partials, in units of 16 bytes
  };

  __device__ __forceinline__ void combine_split(const SplitWork& split_work, const Plan& plan) {
    constexpr int kRowVectors = T::kHeadDim / 4;
    static_assert(sizeof(CombineStorage) <= sizeof(shared.k) + sizeof(shared.v),
                  "tiles are over, their memory is free");
    CombineStorage& staged = *reinterpret_cast<CombineStorage*>(shared.k);
    const auto sync = [] { ptx::barrier_sync(Barrier::kConsumers, kThreads); };
    const Work& work = split_work.work;
    const int results = split_work.results, blocks = split_work.blocks;
    const int warp = threadIdx.x / 32, result_step = p.slot_rows * (T::kHeadDim + 2) / 4;
    // All warps but the first do this. Meanwhile a thread of the first waits for the other blocks.
    const auto list_offsets = [&](int begin) {
      if (threadIdx.x < 32) return;
      for (int i = threadIdx.x - 32; i < min(results - begin, CombineStorage::kResults); i += kThreads - 32) {
        staged.offsets[i] = split_work.slot(begin + i, p.slots) * result_step;
      }
    };
    list_offsets(0);
    int listed = 0;  // first result in staged.offsets
    const float v_scale = v_scale_of(work);
    unsigned* const done = plan.done(work.index, work.head, p.kv_heads);
    bool all_done = false;
    const auto wait_all = [&] {
      if (threadIdx.x == 0) {
        const unsigned parts = work.chunks;
        while (ptx::load_acquire(done) < parts) {
        }
        ptx::increment(done, parts + blocks - 1);
      }
      all_done = true;
    };
    const int elements = partial_rows(work.tile) * kRowVectors, rank = split_work.split - split_work.first_split;
    const int stop = (rank + 1) * elements / blocks;
    for (int first = rank * elements / blocks; first < stop; first += CombineStorage::kElements) {
      const int count = min(stop - first, CombineStorage::kElements),
                batch_results = min(CombineStorage::kValues / count, CombineStorage::kResults);
      const int first_row = first / kRowVectors, rows = (first + count - 1) / kRowVectors - first_row + 1;
      // Copies are strided by kThreads over the (result, element) pairs.
      const int first_result = threadIdx.x / count, first_element = threadIdx.x % count;
      const int step_results = kThreads / count, step = kThreads % count;
      for (int begin = 0; begin < results; begin += batch_results) {
        const int batch = min(results - begin, batch_results), row_step = (batch + 3) / 4 * 4;
        if (begin < listed || begin + batch > listed + CombineStorage::kResults) {
          sync();
          list_offsets(begin);
          listed = begin;
        }
        if (!all_done) wait_all();  // as late as possible: the work above overlaps with the wait
        sync();
        const int* const offsets = staged.offsets + begin - listed;
        const float4* const partials = reinterpret_cast<const float4*>(p.partials);
        // Maxima and sums first, because the factors take longer to compute.
        for (int row = warp; row < rows; row += kThreads / 32) {
          for (int result = threadIdx.x % 32; result < batch; result += 32) {
            const int entry = row * row_step + result;
            const float* const from = reinterpret_cast<const float*>(partials + offsets[result]) +
                                      (p.slot_rows * T::kHeadDim + first_row + row);
            ptx::cp_async_4(&staged.max[entry], from);
            ptx::cp_async_4(&staged.sum[entry], from + p.slot_rows);
          }
        }
        ptx::cp_async_commit();
        for (int result = first_result, element = first_element; result < batch;) {
          ptx::cp_async_16(&staged.values[result * count + element], partials + offsets[result] + (first + element),
                           16);
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
          find_factors(staged, row * row_step, batch, begin == 0, staged.row_max[row]);
        }
        ptx::cp_async_wait<0>();
        sync();
        merge_results(staged, first, count, rows, batch, row_step, begin == 0);
      }
      sync();
      write_output(staged, work, first, count, v_scale);
    }
    if (!all_done) wait_all();  // a block without elements, if there are more blocks than elements
  }

  // Computes the merge factors of a row's results, by one warp, and updates the row maximum. A lane handles an odd
  // number of adjacent results, to avoid bank conflicts. entry: index of the row's first result. begins: there is no
  // earlier batch.
  __device__ __forceinline__ static void find_factors(CombineStorage& staged, int entry, int results, bool begins,
                                                      float& row_max) {
    constexpr int kMaxLaneResults = CombineStorage::kResults / 32 | 1;
    const int lane = threadIdx.x % 32, lane_results = (results + 31) / 32 | 1;
    const int first = lane * lane_results, count = min(lane_results, results - first);
    float maxima[kMaxLaneResults], lane_max = -CUDART_INF_F;  // maximum up to this lane's last result
#pragma unroll
    for (int i = 0; i < kMaxLaneResults; ++i) {
      if (i < count) maxima[i] = staged.max[entry + first + i];
    }
#pragma unroll
    for (int i = 0; i < kMaxLaneResults; ++i) {
      if (i < count) lane_max = fmaxf(lane_max, maxima[i]);
    }
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const float other = __shfl_up_sync(0xffffffffu, lane_max, step);
      lane_max = lane >= step ? fmaxf(lane_max, other) : lane_max;
    }
    const float before = begins ? -CUDART_INF_F : row_max, others = __shfl_up_sync(0xffffffffu, lane_max, 1);
    float max = lane > 0 ? fmaxf(before, others) : before;
#pragma unroll
    for (int i = 0; i < kMaxLaneResults; ++i) {
      if (i >= count) break;
      const Merge merge(max, maxima[i]);
      staged.before[entry + first + i] = merge.before;
      staged.after[entry + first + i] = merge.after;
    }
    __syncwarp();
    if (lane == 31) row_max = fmaxf(before, lane_max);
  }

  // Merges a batch of results in order; a thread handles one value of O or one row sum.
  __device__ __forceinline__ static void merge_results(CombineStorage& staged, int first, int count, int rows,
                                                       int results, int row_step, bool begins) {
    constexpr int kRowVectors = T::kHeadDim / 4, kBatch = 16;
    for (int i = threadIdx.x; i < 4 * count + rows; i += kThreads) {
      const bool is_sum = i >= 4 * count;
      const int row = is_sum ? i - 4 * count : (first + i / 4) / kRowVectors - first / kRowVectors,
                entry = row * row_step;
      const int step = is_sum ? 1 : 4 * count;
      const float* from = is_sum ? staged.sum + entry : reinterpret_cast<const float*>(staged.values) + i;
      float x = begins ? 0.0f : staged.merged[i];
      int u = 0;
      for (; u + kBatch <= results; u += kBatch) {
        float before[kBatch], after[kBatch], next[kBatch];
#pragma unroll
        for (int v = 0; v < kBatch; v += 4) {
          reinterpret_cast<float4&>(before[v]) = *reinterpret_cast<const float4*>(staged.before + entry + u + v);
          reinterpret_cast<float4&>(after[v]) = *reinterpret_cast<const float4*>(staged.after + entry + u + v);
        }
#pragma unroll
        for (int v = 0; v < kBatch; ++v, from += step) next[v] = *from;
#pragma unroll
        for (int v = 0; v < kBatch; ++v) x = Merge::of(x, before[v], next[v], after[v]);
      }
#pragma unroll 4
      for (; u < results; ++u, from += step) {
        x = Merge::of(x, staged.before[entry + u], *from, staged.after[entry + u]);
      }
      staged.merged[i] = x;
    }
  }

  // Writes O of the merged elements, and LSE.
  __device__ __forceinline__ void write_output(const CombineStorage& staged, const Work& work, int first, int count,
                                               float v_scale) const {
    constexpr int kRowVectors = T::kHeadDim / 4;
    for (int i = threadIdx.x; i < count; i += kThreads) {
      const int row = (first + i) / kRowVectors, column = (first + i) % kRowVectors * 4,
                row_in_batch = row - first / kRowVectors;
      const float* const x = staged.merged + 4 * i;
      const RowFinalizer finalize(p, work, row, staged.row_max[row_in_batch], staged.merged[4 * count + row_in_batch],
                                  column == 0, v_scale);
      *reinterpret_cast<uint2*>(out_row(work, row) + column) =
          make_uint2(pair(finalize(x[0]), finalize(x[1])), pair(finalize(x[2]), finalize(x[3])));
    }
  }
};

}  // namespace greenfast::serving

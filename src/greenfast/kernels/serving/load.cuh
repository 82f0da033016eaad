// The producer warpgroup: its warps load K, V, Q and scales, and transpose row-major V.
#pragma once

#include <math_constants.h>

#include "attention/sm90/traits.cuh"
#include "ptx/bulk.cuh"
#include "ptx/load.cuh"
#include "ptx/math.cuh"
#include "ptx/tma.cuh"
#include "serving/traits.cuh"
#include "serving/v_stage.cuh"

namespace greenfast::serving {

// A sequence's row of the block table. Indices beyond the table and page numbers out of range are clamped: the result
// of such a call is wrong, but it reads no memory outside the cache.
struct BlockTable {
  const int* row;
  int entries, pages;
  __device__ __forceinline__ BlockTable(const AttentionParams& p, int sequence)
      : row(p.block_table + static_cast<long long>(sequence) * p.table_row), entries(p.table_entries), pages(p.pages) {}
  __device__ __forceinline__ int entry(int logical_page) const { return row[min(logical_page, entries - 1)]; }
  __device__ __forceinline__ int clamp(int entry) const { return min(max(entry, 0), pages - 1); }
  __device__ __forceinline__ int page(int logical_page) const { return clamp(entry(logical_page)); }
};

// Publishes the next work item and loads its Q to staged_q. Called by one producer warp.
template <class T>
__device__ __forceinline__ void load_q(const AttentionParams& p, Storage<T>& shared, const Work& work) {
  const int lane = threadIdx.x % 32, group = p.batch.group;
  const int stop = T::kStagedQRows > 0 ? work.tile.rows(T::kRows, group) : 0, rows = stop <= T::kStagedQRows ? stop : 0;
  if (lane == 0) {
    shared.next = work;
    shared.q_full.arrive_expect(rows * T::kQRowBytes);
  }
  __syncwarp();
  static_assert(T::kStagedQRows <= 32, "a row's lane copies it");
  if (lane < rows) {
    const int row = work.tile.first_row + lane, token = p.batch.token(row);
    const int head = work.head * group + row - token * group;
    const long long offset = (work.tile.q_begin + token) * p.q_token + head * p.q_head;
    ptx::bulk_load(shared.staged_q + lane * T::kQRowBytes,
                   static_cast<const unsigned char*>(p.q) + offset * (T::kQRowBytes / T::kHeadDim), T::kQRowBytes,
                   shared.q_full);
  }
}

// With kPrefetchScales: loads the per-head scales of a work item, and prefetches its Q to L2 if it is not staged in
// shared memory. This hides their latency from the consumers. Called by one producer warp.
template <class T>
__device__ __forceinline__ void load_head_scales(const AttentionParams& p, Storage<T>& shared, const Work& work,
                                                 unsigned q_parity) {
  const int lane = threadIdx.x % 32, group = p.batch.group;
  const long long sequence = work.tile.sequence;
  const float k = p.k_scale[sequence * p.k_scale_strides[0] + work.head * p.k_scale_strides[1]];
  const float v = p.v_scale[sequence * p.v_scale_strides[0] + work.head * p.v_scale_strides[1]];
  shared.q_empty.wait(q_parity ^ 1);
  if (lane == 0) {
    shared.next_scales[0] = k;
    shared.next_scales[1] = v;
    shared.q_full.arrive();
  }
  const int rows = work.tile.rows(T::kRows, group);
  for (int r = lane; rows > T::kStagedQRows && r < rows; r += 32) {
    const int row = work.tile.first_row + r, token = p.batch.token(row), head = work.head * group + row - token * group;
    const long long offset = (work.tile.q_begin + token) * p.q_token + head * p.q_head;
    ptx::bulk_prefetch(static_cast<const unsigned char*>(p.q) + offset * (T::kQRowBytes / T::kHeadDim), T::kQRowBytes);
  }
}

// Tells the consumers that this producer warp has reached the next work item, or the end of the work.
template <class T>
__device__ __forceinline__ void signal_work_ready(Storage<T>& shared, unsigned q_parity) {
  shared.q_empty.wait(q_parity ^ 1);
  if (threadIdx.x % 32 == 0) shared.q_full.arrive();
}

// Loads the per-head scales of all work items. Called by producer warp 1.
template <class T>
__device__ __forceinline__ void head_scale_loop(const AttentionParams& p, Storage<T>& shared) {
  const Plan plan = plan_of(p);
  WorkScheduler scheduler;
  scheduler.start(plan);
  unsigned q_parity = 0;
  for (Work work; scheduler.next_work(plan, p.kv_heads, work); q_parity ^= 1)
    load_head_scales(p, shared, work, q_parity);
  signal_work_ready(shared, q_parity);
}

// With kSchedulerWarp: publishes all work items with their Q and scales, and the splits to combine. Called by producer
// warp 3.
template <class T>
__device__ __forceinline__ void scheduler_loop(const AttentionParams& p, Storage<T>& shared) {
  const Plan plan = plan_of(p);
  WorkScheduler scheduler;
  scheduler.start(plan);
  const bool leads = threadIdx.x % 32 == 0;
  unsigned q_parity = 0;
  int split_works = 0;
  for (Work work; scheduler.next_work(plan, p.kv_heads, work); q_parity ^= 1) {
    shared.q_empty.wait(q_parity ^ 1);
    load_q(p, shared, work);
    if constexpr (T::kPrefetchScales) load_head_scales(p, shared, work, q_parity);
    if (work.covers_tile()) continue;
    if (leads) shared.split_works[split_works].find(plan, work);
    ++split_works;
  }
  shared.q_empty.wait(q_parity ^ 1);
  if (leads) {
    shared.split_count = split_works;
    shared.next = Work{};
    shared.q_full.arrive();
    if constexpr (T::kPrefetchScales) shared.q_full.arrive();
  }
}

// The barrier that copies into a stage of V complete on.
template <class T>
__device__ __forceinline__ ptx::Mbarrier& v_barrier(Storage<T>& shared, int stage) {
  if constexpr (T::kProducerTransposesV) {
    return shared.row_major_v.full[stage];
  } else {
    return shared.v_full[stage];
  }
}

// Starts a TMA copy of rows of a page. For decoding each key is read once, hence evict_first.
template <class T>
__device__ __forceinline__ void tma_load_rows(void* dst, const ptx::TensorMap& map, ptx::Mbarrier& full, int column,
                                              int key, int head, int page) {
  if constexpr (T::kSwapAB) {
    ptx::tma_load_4d(dst, map, full, column, key, head, page, ptx::evict_first());
  } else {
    ptx::tma_load_4d(dst, map, full, column, key, head, page);
  }
}

// Starts TMA copies of a page of row-major V into a stage. slot: the page's first key in the tile.
template <class T>
__device__ __forceinline__ void load_v_rows(const AttentionParams& p, unsigned char* stage, ptx::Mbarrier& full,
                                            const ptx::TensorMap& v_map, int slot, int head, int page) {
  if constexpr (T::kTransposeV && T::kPanels > 1) {  // both panels of 16 keys are adjacent, for the transpose in place
    for (int key = 0; key < p.page; key += 16) {
      for (int i = 0; i < T::kPanels; ++i) {
        tma_load_rows<T>(stage + (slot + key) * T::kHeadDim + i * 16 * T::kPanel, v_map, full, i * T::kPanel, key, head,
                         page);
      }
    }
  } else {
    for (int i = 0; i < T::kPanels; ++i) {
      tma_load_rows<T>(stage + (i * kBlockN + slot) * T::kPanel, v_map, full, i * T::kPanel, 0, head, page);
    }
  }
}

// With one stage, the load of a tile starts when the previous tile is consumed, so its latency is exposed. Prefetching
// to L2 a tile ahead shortens it. This prefetches row-major pages. keys: rows in a box of the tensor map.
template <class T>
__device__ __forceinline__ void prefetch_rows_l2(const AttentionParams& p, const ptx::TensorMap& map, int keys,
                                                 int head, int page) {
  for (int key = 0; key < p.page; key += keys) {
    for (int i = 0; i < T::kPanels; ++i) ptx::tma_prefetch_4d(map, i * T::kPanel, key, head, page);
  }
}

// The load loop of a producer warp. kLoadK: loads Q and K; kLoadV: loads V. Each lane issues the copies of one page.
template <class T, bool kLoadK, bool kLoadV>
__device__ __forceinline__ void produce(const AttentionParams& p, Storage<T>& shared, const ptx::TensorMap& k_map,
                                        const ptx::TensorMap& v_map) {
  const int lane = threadIdx.x % 32;
  const int pages = kBlockN / p.page;
  const unsigned page_bytes = p.page * T::kHeadDim;
  const unsigned char* const v_pages = static_cast<const unsigned char*>(p.v);
  Ring<T::kStages> ring;
  const Plan plan = plan_of(p);
  WorkScheduler scheduler;
  scheduler.start(plan);
  unsigned q_parity = 0, loaded_parity = 0;
  for (Work work; scheduler.next_work(plan, p.kv_heads, work);) {
    const int begin = work.tile.key_begin, end = work.tile.key_end;
    const BlockTable table(p, work.tile.sequence);
    const int stop = work.n_block_max();
    const auto has_page = [&](int page) { return lane < pages && page * p.page < end && (page + 1) * p.page > begin; };
    int tile = work.n_block_min();
    int page = tile * pages + lane, next = has_page(page) ? table.entry(page) : 0;
    // Q is loaded before K and V: after them it would be late, because so much data is in flight.
    if constexpr (kLoadK && !T::kSchedulerWarp) {
      shared.q_empty.wait(q_parity ^ 1);
      q_parity ^= 1;
      load_q(p, shared, work);
    } else if constexpr (T::kPrefetchScales && T::kProducerTransposesV) {
      load_head_scales(p, shared, work, q_parity);
      q_parity ^= 1;
    }
    for (; tile < stop; ++tile, ring.advance()) {
      const int s = ring.stage, physical_page = table.clamp(next);
      const bool needed = has_page(page);
      const unsigned bytes = __popc(__ballot_sync(0xffffffffu, needed)) * page_bytes;
      page += pages;
      next = tile + 1 < stop && has_page(page) ? table.entry(page) : 0;
      if constexpr (kLoadK) {
        shared.k_empty[s].wait(ring.parity ^ 1);
        if (lane == 0) shared.k_full[s].arrive_expect(bytes);
        __syncwarp();
        if (needed) {
          for (int i = 0; i < T::kPanels; ++i) {
            tma_load_rows<T>(shared.k[s][i] + lane * p.page * T::kPanel, k_map, shared.k_full[s], i * T::kPanel, 0,
                             work.head, physical_page);
          }
        }
        if constexpr (T::kPrefetchL2) {
          if (tile + 1 < stop && has_page(page)) prefetch_rows_l2<T>(p, k_map, p.page, work.head, table.clamp(next));
        }
      }
      if constexpr (kLoadV) {
        shared.v_empty[s].wait(ring.parity ^ 1);
        ZeroFill zero_fill;
        if constexpr (T::kProducerZeroFills) {
          zero_fill = zero_unloaded<T>(shared.v[s][0], p.page, begin - tile * kBlockN, end - tile * kBlockN);
        }
        const auto full = [&]() -> ptx::Mbarrier& {
          if constexpr (T::kProducerZeroFills) {
            if (zero_fill.pending) return shared.loaded_v.full;
          }
          return v_barrier(shared, s);
        };
        if (lane == 0) {
          if constexpr (T::kProducerTransposesV) shared.row_major_v.end[s] = 0;
          full().arrive_expect(bytes);
        }
        __syncwarp();
        if (needed) {
          if constexpr (T::kRowMajorV) {
            load_v_rows<T>(p, shared.v[s][0], full(), v_map, lane * p.page, work.head, physical_page);
          } else {
            const long long offset = physical_page * p.v_page + work.head * p.v_head;
            if constexpr (T::kSwapAB) {
              ptx::bulk_load(shared.v[s][0] + lane * page_bytes, v_pages + offset, page_bytes, full(),
                             ptx::evict_first());
            } else {
              ptx::bulk_load(shared.v[s][0] + lane * page_bytes, v_pages + offset, page_bytes, full());
            }
          }
        }
        if constexpr (T::kPrefetchL2) {
          if (tile + 1 < stop && has_page(page)) {
            if constexpr (T::kRowMajorV) {
              prefetch_rows_l2<T>(p, v_map, 16, work.head, table.clamp(next));
            } else {
              ptx::bulk_prefetch(v_pages + table.clamp(next) * p.v_page + work.head * p.v_head, page_bytes);
            }
          }
        }
        if constexpr (T::kProducerZeroFills) {
          if (zero_fill.pending) {
            shared.loaded_v.full.wait(loaded_parity);
            loaded_parity ^= 1;
            zero_v_keys<T, 1>(shared.v[s][0], 0, zero_fill.begin, zero_fill.end, begin - tile * kBlockN,
                              end - tile * kBlockN);
            __syncwarp();
            if (lane == 0) shared.v_full[s].arrive();
          }
        }
      }
    }
  }
  if constexpr (kLoadV && T::kProducerTransposesV) {
    shared.v_empty[ring.stage].wait(ring.parity ^ 1);
    if (lane == 0) {
      shared.row_major_v.end[ring.stage] = 1;
      shared.row_major_v.full[ring.stage].arrive();
    }
  }
  if constexpr (!kLoadK || T::kSchedulerWarp) {
    if constexpr (T::kPrefetchScales && T::kProducerTransposesV) signal_work_ready(shared, q_parity);
    return;
  }
  shared.q_empty.wait(q_parity ^ 1);
  if (lane == 0) {
    shared.next = Work{};
    shared.q_full.arrive();
  }
}

// Transposes all tiles of V in shared memory. Called by kNumTransposeWarps producer warps.
template <class T>
__device__ __forceinline__ void transpose_v_loop(Storage<T>& shared) {
  for (Ring<T::kStages> ring;; ring.advance()) {
    const int s = ring.stage;
    shared.row_major_v.full[s].wait(ring.parity);
    if (shared.row_major_v.end[s]) break;
    transpose_stage<T, T::kNumTransposeWarps>(shared.v[s][0], threadIdx.x / 32 % 4 - T::kFirstTransposeWarp);
    __syncwarp();
    if (threadIdx.x % 32 == 0) shared.v_full[s].arrive();
  }
}

// Loads a token's scale of K or V. For decoding it is read once. An ordinary load would keep the line in L1 and L2, and
// make decoding 13 % slower at head dim 64. L1 no-allocate, or the L2 hint, is enough to avoid that.
template <class T>
__device__ __forceinline__ float load_token_scale(const float* from) {
  if constexpr (T::kSwapAB) {
    return ptx::load_once(from, ptx::evict_first());
  } else {
    return *from;
  }
}

// With kTokenScales: loads the token scales of all tiles and computes KeyScales. Called by kScaleWarps producer warps,
// from warp 1 on.
template <class T>
__device__ __forceinline__ void token_scale_loop(const AttentionParams& p, Storage<T>& shared) {
  constexpr int kThreads = 32 * T::kScaleWarps, kOwn = kBlockN / kThreads;
  const int thread = threadIdx.x % 128 - 32;
  Ring<T::kScaleStages> ring;
  unsigned tiles = 0, q_parity = 0;  // tiles: so far, over all work items
  const Plan plan = plan_of(p);
  WorkScheduler scheduler;
  scheduler.start(plan);
  for (Work work; scheduler.next_work(plan, p.kv_heads, work); q_parity ^= 1) {
    if constexpr (T::kScaleWarpFollows) signal_work_ready(shared, q_parity);
    const BlockTable table(p, work.tile.sequence);
    const int stop = work.n_block_max();
    for (int tile = work.n_block_min(); tile < stop; ++tile, ++tiles, ring.advance()) {
      const int s = ring.stage;
      float scales[kOwn], v_scales[kOwn];
      for (int i = 0; i < kOwn; ++i) {
        const int key = tile * kBlockN + thread + i * kThreads;
        scales[i] = v_scales[i] = 1.0f;
        if (key >= work.tile.key_begin && key < work.tile.key_end) {
          const long long page = table.page(key / p.page);
          const int slot = key % p.page;
          scales[i] =
              load_token_scale<T>(p.k_scale + page * p.k_scale_strides[0] + work.head * p.k_scale_strides[1] + slot);
          v_scales[i] =
              load_token_scale<T>(p.v_scale + page * p.v_scale_strides[0] + work.head * p.v_scale_strides[1] + slot);
        }
      }
      if constexpr (T::kStages > 1) {
        shared.v_empty[s].wait(ring.parity ^ 1);
      } else if (tile == work.n_block_min()) {
        // The last two tiles of the previous work item may both be consumed by now, and an mbarrier wait can tell only
        // adjacent phases apart.
        shared.q_empty.wait(q_parity);
      } else if (tiles >= 2) {
        shared.v_empty[0].wait(tiles % 2);  // the tile before the previous one; the previous tile uses the other buffer
      }
      for (int i = 0; i < kOwn; ++i) {
        const int key = thread + i * kThreads;
        KeyScales& key_scales = shared.key_scales[s];
        // A scale that is NaN or 0 must make NaN exactly the rows that attend to the key; the exponent does that.
        const bool valid = v_scales[i] >= kMinFactor;
        key_scales.scale[key] = scales[i];
        key_scales.log2_value[key] = valid ? __log2f(v_scales[i]) : CUDART_NAN_F;
        key_scales.inverse_value[key] = valid ? ptx::inverse(v_scales[i]) : 0.0f;
      }
      __syncwarp();
      if (threadIdx.x % 32 == 0) shared.scales_full[s].arrive();
    }
  }
  if constexpr (T::kScaleWarpFollows) signal_work_ready(shared, q_parity);
}

}  // namespace greenfast::serving

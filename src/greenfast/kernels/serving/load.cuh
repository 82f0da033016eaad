// The producer, whose warps fetch what the consumers read: pages of K and V, Q, and scales. They turn rows of V too.
#pragma once

#include <math_constants.h>

#include "attention/sm90/traits.cuh"
#include "ptx/bulk.cuh"
#include "ptx/load.cuh"
#include "ptx/math.cuh"
#include "ptx/tma.cuh"
#include "serving/traits.cuh"
#include "serving/value_stage.cuh"

namespace greenfast::serving {

// A sequence's row of the block table. What lies outside, or names a page that there is not, becomes one that there is:
// such a call has a wrong result, and reads no memory that is not the cache's.
struct BlockTable {
  const int* row;
  int entries, pages;
  __device__ __forceinline__ BlockTable(const AttentionParams& p, int sequence)
      : row(p.block_table + static_cast<long long>(sequence) * p.table_row), entries(p.table_entries), pages(p.pages) {}
  __device__ __forceinline__ int entry(int number) const { return row[min(number, entries - 1)]; }
  __device__ __forceinline__ int known(int entry) const { return min(max(entry, 0), pages - 1); }
  __device__ __forceinline__ int page(int number) const { return known(entry(number)); }
};

// By a warp of the producer: says which work is next, and fetches its Q.
template <class T>
__device__ __forceinline__ void fetch_queries(const AttentionParams& p, Storage<T>& shared, const Work& work) {
  const int lane = threadIdx.x % 32, group = p.batch.group;
  const int stop = T::kRawRows > 0 ? work.tile.rows(T::kRows, group) : 0, rows = stop <= T::kRawRows ? stop : 0;
  if (lane == 0) {
    shared.next = work;
    shared.q_full.arrive_expect(rows * T::kRawBytes);
  }
  __syncwarp();
  static_assert(T::kRawRows <= 32, "a row's lane copies it");
  if (lane < rows) {
    const int row = work.tile.first_row + lane, token = p.batch.token(row);
    const int head = work.head * group + row - token * group;
    const long long at = (work.tile.q_begin + token) * p.q_token + head * p.q_head;
    ptx::bulk_load(shared.raw_q + lane * T::kRawBytes,
                   static_cast<const unsigned char*>(p.q) + at * (T::kRawBytes / T::kHeadDim), T::kRawBytes,
                   shared.q_full);
  }
}

// With kScalesAhead: the scales of a work's K and V, and its Q into L2 where that is not fetched into shared memory.
// Consumers would wait for both.
template <class T>
__device__ __forceinline__ void fetch_scales(const AttentionParams& p, Storage<T>& shared, const Work& work,
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
  for (int r = lane; rows > T::kRawRows && r < rows; r += 32) {
    const int row = work.tile.first_row + r, token = p.batch.token(row), head = work.head * group + row - token * group;
    const long long at = (work.tile.q_begin + token) * p.q_token + head * p.q_head;
    ptx::bulk_prefetch(static_cast<const unsigned char*>(p.q) + at * (T::kRawBytes / T::kHeadDim), T::kRawBytes);
  }
}

// By a warp that consumers wait for before they begin a work: it has come to that work, or there is none.
template <class T>
__device__ __forceinline__ void come_to_work(Storage<T>& shared, unsigned q_parity) {
  shared.q_empty.wait(q_parity ^ 1);
  if (threadIdx.x % 32 == 0) shared.q_full.arrive();
}

// The producer's second warp, where it does nothing else.
template <class T>
__device__ __forceinline__ void fetch_scales(const AttentionParams& p, Storage<T>& shared) {
  const Plan plan = plan_of(p);
  Schedule schedule;
  schedule.start(plan);
  unsigned q_parity = 0;
  for (Work work; schedule.get(plan, p.kv_heads, work); q_parity ^= 1) fetch_scales(p, shared, work, q_parity);
  come_to_work(shared, q_parity);
}

// With kWorksApart, the producer's last warp.
template <class T>
__device__ __forceinline__ void fetch_works(const AttentionParams& p, Storage<T>& shared) {
  const Plan plan = plan_of(p);
  Schedule schedule;
  schedule.start(plan);
  const bool leads = threadIdx.x % 32 == 0;
  unsigned q_parity = 0;
  int pieces = 0;
  for (Work work; schedule.get(plan, p.kv_heads, work); q_parity ^= 1) {
    shared.q_empty.wait(q_parity ^ 1);
    fetch_queries(p, shared, work);
    if constexpr (T::kScalesAhead) fetch_scales(p, shared, work, q_parity);
    if (work.whole()) continue;
    if (leads) shared.pieces[pieces].find(plan, work);
    ++pieces;
  }
  shared.q_empty.wait(q_parity ^ 1);
  if (leads) {
    shared.piece_count = pieces;
    shared.next = Work{};
    shared.q_full.arrive();
    if constexpr (T::kScalesAhead) shared.q_full.arrive();
  }
}

// What copies of V into a stage arrive at.
template <class T>
__device__ __forceinline__ ptx::Mbarrier& value_barrier(Storage<T>& shared, int stage) {
  if constexpr (T::kTurnsAhead) {
    return shared.rows_of_v.full[stage];
  } else {
    return shared.v_full[stage];
  }
}

// Starts copying rows of a page. Where a row tile has all queries of a sequence, its keys are read once.
template <class T>
__device__ __forceinline__ void load_rows(void* to, const ptx::TensorMap& map, ptx::Mbarrier& full, int column, int key,
                                          int head, int page) {
  if constexpr (T::kFewRows > 0) {
    ptx::tma_load_4d(to, map, full, column, key, head, page, ptx::evict_first());
  } else {
    ptx::tma_load_4d(to, map, full, column, key, head, page);
  }
}

// Starts copying rows of a page of V into a stage, where its keys begin at `slot`.
template <class T>
__device__ __forceinline__ void fetch_rows(const AttentionParams& p, unsigned char* stage, ptx::Mbarrier& full,
                                           const ptx::TensorMap& v_map, int slot, int head, int page) {
  if constexpr (T::kTurnsValues && T::kPanels > 1) {  // panels of 16 keys side by side, to be turned in place
    for (int key = 0; key < p.page; key += 16) {
      for (int i = 0; i < T::kPanels; ++i) {
        load_rows<T>(stage + (slot + key) * T::kHeadDim + i * 16 * T::kPanel, v_map, full, i * T::kPanel, key, head,
                     page);
      }
    }
  } else {
    for (int i = 0; i < T::kPanels; ++i) {
      load_rows<T>(stage + (i * kTile + slot) * T::kPanel, v_map, full, i * T::kPanel, 0, head, page);
    }
  }
}

// With one stage a tile is asked for when the one before it is over, and everyone waits for it. So it is in L2 by then:
// a lane's page of K or V is prefetched a tile ahead. Here rows, of which a box of the map has `keys`.
template <class T>
__device__ __forceinline__ void prefetch_rows(const AttentionParams& p, const ptx::TensorMap& map, int keys, int head,
                                              int page) {
  for (int key = 0; key < p.page; key += keys) {
    for (int i = 0; i < T::kPanels; ++i) ptx::tma_prefetch_4d(map, i * T::kPanel, key, head, page);
  }
}

// By a warp of the producer: Q and pages of K, pages of V, or all of them. A page's lane issues its copies.
template <class T, bool kKeys, bool kValues>
__device__ __forceinline__ void fetch(const AttentionParams& p, Storage<T>& shared, const ptx::TensorMap& k_map,
                                      const ptx::TensorMap& v_map) {
  const int lane = threadIdx.x % 32;
  const int pages = kTile / p.page;
  const unsigned page_bytes = p.page * T::kHeadDim;
  const unsigned char* const values = static_cast<const unsigned char*>(p.v);
  Ring<T::kStages> ring;
  const Plan plan = plan_of(p);
  Schedule schedule;
  schedule.start(plan);
  unsigned q_parity = 0, landed_parity = 0;
  for (Work work; schedule.get(plan, p.kv_heads, work);) {
    const int begin = work.tile.key_begin, end = work.tile.key_end;
    const BlockTable table(p, work.tile.sequence);
    const int stop = work.stop_tile();
    const auto has = [&](int page) { return lane < pages && page * p.page < end && (page + 1) * p.page > begin; };
    int tile = work.first_tile();
    int page = tile * pages + lane, next = has(page) ? table.entry(page) : 0;
    // Q is asked for before K and V, of which so much is on its way that Q would come late.
    if constexpr (kKeys && !T::kWorksApart) {
      shared.q_empty.wait(q_parity ^ 1);
      q_parity ^= 1;
      fetch_queries(p, shared, work);
    } else if constexpr (T::kScalesAhead && T::kTurnsAhead) {
      fetch_scales(p, shared, work, q_parity);
      q_parity ^= 1;
    }
    for (; tile < stop; ++tile, ring.advance()) {
      const int s = ring.stage, number = table.known(next);
      const bool needed = has(page);
      const unsigned bytes = __popc(__ballot_sync(0xffffffffu, needed)) * page_bytes;
      page += pages;
      next = tile + 1 < stop && has(page) ? table.entry(page) : 0;
      if constexpr (kKeys) {
        shared.k_empty[s].wait(ring.parity ^ 1);
        if (lane == 0) shared.k_full[s].arrive_expect(bytes);
        __syncwarp();
        if (needed) {
          for (int i = 0; i < T::kPanels; ++i) {
            load_rows<T>(shared.k[s][i] + lane * p.page * T::kPanel, k_map, shared.k_full[s], i * T::kPanel, 0,
                         work.head, number);
          }
        }
        if constexpr (T::kPrefetches) {
          if (tile + 1 < stop && has(page)) prefetch_rows<T>(p, k_map, p.page, work.head, table.known(next));
        }
      }
      if constexpr (kValues) {
        shared.v_empty[s].wait(ring.parity ^ 1);
        Cleared cleared;
        if constexpr (T::kClearsAhead) {
          cleared = clear_unfetched<T>(shared.v[s][0], p.page, begin - tile * kTile, end - tile * kTile);
        }
        const auto full = [&]() -> ptx::Mbarrier& {
          if constexpr (T::kClearsAhead) {
            if (cleared.later) return shared.landed.full;
          }
          return value_barrier(shared, s);
        };
        if (lane == 0) {
          if constexpr (T::kTurnsAhead) shared.rows_of_v.end[s] = 0;
          full().arrive_expect(bytes);
        }
        __syncwarp();
        if (needed) {
          if constexpr (T::kRowValues) {
            fetch_rows<T>(p, shared.v[s][0], full(), v_map, lane * p.page, work.head, number);
          } else {
            const long long at = number * p.v_page + work.head * p.v_head;
            if constexpr (T::kFewRows > 0) {
              ptx::bulk_load(shared.v[s][0] + lane * page_bytes, values + at, page_bytes, full(), ptx::evict_first());
            } else {
              ptx::bulk_load(shared.v[s][0] + lane * page_bytes, values + at, page_bytes, full());
            }
          }
        }
        if constexpr (T::kPrefetches) {
          if (tile + 1 < stop && has(page)) {
            if constexpr (T::kRowValues) {
              prefetch_rows<T>(p, v_map, 16, work.head, table.known(next));
            } else {
              ptx::bulk_prefetch(values + table.known(next) * p.v_page + work.head * p.v_head, page_bytes);
            }
          }
        }
        if constexpr (T::kClearsAhead) {
          if (cleared.later) {
            shared.landed.full.wait(landed_parity);
            landed_parity ^= 1;
            clear_values<T, 1>(shared.v[s][0], 0, cleared.begin, cleared.end, begin - tile * kTile, end - tile * kTile);
            __syncwarp();
            if (lane == 0) shared.v_full[s].arrive();
          }
        }
      }
    }
  }
  if constexpr (kValues && T::kTurnsAhead) {
    shared.v_empty[ring.stage].wait(ring.parity ^ 1);
    if (lane == 0) {
      shared.rows_of_v.end[ring.stage] = 1;
      shared.rows_of_v.full[ring.stage].arrive();
    }
  }
  if constexpr (!kKeys || T::kWorksApart) {
    if constexpr (T::kScalesAhead && T::kTurnsAhead) come_to_work(shared, q_parity);
    return;
  }
  shared.q_empty.wait(q_parity ^ 1);
  if (lane == 0) {
    shared.next = Work{};
    shared.q_full.arrive();
  }
}

// By kTurners warps of the producer: turns all tiles of V.
template <class T>
__device__ __forceinline__ void turn_values(Storage<T>& shared) {
  for (Ring<T::kStages> ring;; ring.advance()) {
    const int s = ring.stage;
    shared.rows_of_v.full[s].wait(ring.parity);
    if (shared.rows_of_v.end[s]) break;
    turn_stage<T, T::kTurners>(shared.v[s][0], threadIdx.x / 32 % 4 - T::kFirstTurner);
    __syncwarp();
    if (threadIdx.x % 32 == 0) shared.v_full[s].arrive();
  }
}

// A token's scale of K or V. Where a row tile has all queries of a sequence it is read once. An ordinary load there, which
// leaves the line in L1 and L2, makes decoding slower by 13 % at head dim 64; no allocation in L1, or L2's hint alone,
// does not.
template <class T>
__device__ __forceinline__ float load_scale(const float* from) {
  if constexpr (T::kFewRows > 0) {
    return ptx::load_once(from, ptx::evict_first());
  } else {
    return *from;
  }
}

// With kTokenScales the producer's second warp, and the third if there are two for it: the factors of a tile's keys.
template <class T>
__device__ __forceinline__ void fetch_factors(const AttentionParams& p, Storage<T>& shared) {
  constexpr int kThreads = 32 * T::kFactorWarps, kOwn = kTile / kThreads;
  const int thread = threadIdx.x % 128 - 32;
  Ring<T::kFactorStages> ring;
  unsigned tiles = 0, q_parity = 0;  // so far; of this work
  const Plan plan = plan_of(p);
  Schedule schedule;
  schedule.start(plan);
  for (Work work; schedule.get(plan, p.kv_heads, work); q_parity ^= 1) {
    if constexpr (T::kFactorsFollow) come_to_work(shared, q_parity);
    const BlockTable table(p, work.tile.sequence);
    const int stop = work.stop_tile();
    for (int tile = work.first_tile(); tile < stop; ++tile, ++tiles, ring.advance()) {
      const int s = ring.stage;
      float scales[kOwn], of_values[kOwn];
      for (int i = 0; i < kOwn; ++i) {
        const int key = tile * kTile + thread + i * kThreads;
        scales[i] = of_values[i] = 1.0f;
        if (key >= work.tile.key_begin && key < work.tile.key_end) {
          const long long page = table.page(key / p.page);
          const int slot = key % p.page;
          scales[i] = load_scale<T>(p.k_scale + page * p.k_scale_strides[0] + work.head * p.k_scale_strides[1] + slot);
          of_values[i] = load_scale<T>(p.v_scale + page * p.v_scale_strides[0] + work.head * p.v_scale_strides[1] + slot);
        }
      }
      if constexpr (T::kStages > 1) {
        shared.v_empty[s].wait(ring.parity ^ 1);
      } else if (tile == work.first_tile()) {
        // The last two tiles of the work before may both be over by now, and a barrier tells only one phase from the next.
        shared.q_empty.wait(q_parity);
      } else if (tiles >= 2) {
        shared.v_empty[0].wait(tiles % 2);  // of the tile two before; the tile one before needs these factors
      }
      for (int i = 0; i < kOwn; ++i) {
        const int at = thread + i * kThreads;
        KeyFactors& factors = shared.factors[s];
        // A scale of NaN or 0 is to make rows NaN that attend to the key, through the exponent, and no others.
        const bool valid = of_values[i] >= kLeast;
        factors.scale[at] = scales[i];
        factors.log2_value[at] = valid ? __log2f(of_values[i]) : CUDART_NAN_F;
        factors.inverse_value[at] = valid ? ptx::inverse(of_values[i]) : 0.0f;
      }
      __syncwarp();
      if (threadIdx.x % 32 == 0) shared.factors_full[s].arrive();
    }
  }
  if constexpr (T::kFactorsFollow) come_to_work(shared, q_parity);
}

}  // namespace greenfast::serving

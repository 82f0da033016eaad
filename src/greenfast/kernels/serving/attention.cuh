// Attention over a paged FP8 cache for Hopper: prefill, chunks of it, and decode, by the same arithmetic.
//
// A producer warpgroup fetches pages of K and V; each consumer warpgroup has 64 rows of a row tile (plan.cuh), or with
// kColumnParts 2 both have the same rows and half of the columns of O each. Q is quantized where it is read, a scale for
// each row. S = Q K^T and P V by wgmma on E4M3; P V of a tile runs during the softmax of the next (FlashAttention-3,
// Shah et al., 2024). O of a chunk stays in the tensor cores' accumulators; chunks are merged in float32.
//
// Pages of K hold rows. Pages of V hold, for each 16 keys, a matrix (head_dim, 16): V transposed, its keys in the order
// in which accumulators of S are the A operand of P V (KEY_ORDER in attention/config.py). Or they hold rows, which warps
// of the producer turn into that in their stage; few_rows.cuh takes them as they are.
//
// A NaN of K, or of the scale of a token, reaches the rows that attend to the key. A NaN code of V reaches its column of
// all rows of the row tile where one of them attends to its key, as 0 times NaN is NaN: query tokens before it too, but no
// other sequence or head of K and V.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <math_constants.h>

#include "attention/epilogue.cuh"
#include "attention/sm90/traits.cuh"
#include "ptx/barrier.cuh"
#include "ptx/bulk.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/e4m3.cuh"
#include "ptx/griddepcontrol.cuh"
#include "ptx/math.cuh"
#include "ptx/store.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"
#include "serving/plan.cuh"
#include "serving/value_rows.cuh"

namespace greenfast::serving {

// The weight of a score at a row's maximum is 56 = 2^kOffset. The maximum follows a tile only where that exceeds it by
// more than kSlack, or O would be rescaled most of the time (Dao, FlashAttention-4, 2026); so weights go up to 448, which
// is E4M3's largest number.
constexpr float kSlack = 3.0f, kOffset = 8.807355f - kSlack;
constexpr float kLeastScale = 1.88079096e-37f;  // 2^-122, of a row of Q
constexpr float kLeast = 1.17549435e-38f;  // of factors: 0 times -inf would be NaN
constexpr float kLog2E = 1.4426950408889634f, kLn2 = 0.6931471805599453f;

struct Barrier {
  enum {
    kBlock,      // __syncthreads()
    kConsumers,  // all consumer warpgroups
    kRows = 2,   // and the two after it: the warpgroups that share rows
    kTurn = 5    // and the one after it: the turn of a row part
  };
};

// Members of Cfg:
//   int kHeadDim           64, 128 or 256
//   int kRowParts          warpgroups with 64 rows each
//   int kColumnParts       warpgroups that share rows, and have as many equal parts of O's columns
//   int kFewRows           rows of a row tile of few: 8 or 16, which few_rows.cuh computes with one warpgroup; else 0
//   int kStages            tiles of K, and of V, on their way at a time
//   int kBlocks            of the grid on a multiprocessor
//   int kConsumerRegisters, kProducerRegisters  per thread, from the start of the main loop on
//   int kRawRows           rows of Q that a producer fetches ahead; of a row tile with more, the consumers read them
//   bool kSharedTotals     whether sums over chunks are in shared memory, or in registers
//   int kSmemBytes         of Storage: a check of what Python plans
//   bool kTokenScales      whether each token and head of K and V has a scale, or each head
//   bool kRowValues        whether pages of V hold rows, as those of K
//   bool kSoftcap          whether scores s become softcap * tanh(s / softcap)
//   bool kCodedQueries     whether Q is E4M3 with a scale for each sequence and head of K, or of type In
//   type In, Out           half or __nv_bfloat16
template <class Cfg>
struct Traits : Cfg {
  static constexpr int kConsumers = Cfg::kRowParts * Cfg::kColumnParts;
  static constexpr int kThreads = 128 * (kConsumers + 1);
  static constexpr int kPartRows = Cfg::kFewRows > 0 ? Cfg::kFewRows : 64;  // of a row part
  static constexpr int kRows = kPartRows * Cfg::kRowParts;
  static constexpr int kPanel = Cfg::kHeadDim < 128 ? Cfg::kHeadDim : 128;  // bytes of a row between swizzles
  static constexpr int kPanels = Cfg::kHeadDim / kPanel;
  static constexpr int kColumns = Cfg::kHeadDim / Cfg::kColumnParts;  // of O, of a warpgroup
  static constexpr int kGroupBytes = Cfg::kHeadDim * 16;              // of V: 16 keys
  static constexpr int kRowThreads = 128 * Cfg::kColumnParts;         // that share rows
  static constexpr int kRawBytes = Cfg::kHeadDim * (Cfg::kCodedQueries ? 1 : 2);  // of a row of Q
  // The factors of a tile are needed before P V of the tile before it is over.
  static constexpr int kFactorStages = Cfg::kStages > 1 ? Cfg::kStages : 2;
  // Whether a warp of the producer fetches the scales of heads, one work ahead, and one the pages of V: one for K and V
  // would wait for room for V before it fetches the next K. A block with few works only begins later for it. Where V's
  // rows are turned, it is the same warp.
  static constexpr bool kScalesAhead = Cfg::kRowParts > 1 && !Cfg::kTokenScales, kValuesApart = Cfg::kRowParts > 1;
  // Rows of V are turned by warps of the producer: by two, or by one where others find the factors of keys. With one
  // stage the consumers would wait for them, and turn the rows themselves.
  static constexpr bool kTurnsValues = Cfg::kRowValues && Cfg::kFewRows == 0;
  static constexpr bool kTurnsAhead = kTurnsValues && Cfg::kStages > 1;
  static constexpr int kTurners = Cfg::kTokenScales ? 1 : 2;
  static constexpr int kFirstTurner = !Cfg::kTokenScales ? 1 : kValuesApart ? 2 : 3;
  static constexpr int kFactorWarps = kTurnsAhead && kValuesApart ? 1 : 2;
  static constexpr bool kExchangesRegisters = Cfg::kFewRows == 0 || (Cfg::kRowValues && Cfg::kBlocks > 1);
  // Of a thread's sums over chunks, how many are in registers. At head dim 256 shared memory lacks room for all.
  static constexpr int kHeld = !Cfg::kSharedTotals ? kColumns / 2 : Cfg::kHeadDim == 256 ? 4 : 0;
  // Whether scores are turned into exponents before the mask, or scaled in the exponential.
  static constexpr bool kExponents = Cfg::kTokenScales || Cfg::kSoftcap;
  // Warpgroups exchange the registers that the block began with: for more a warpgroup would wait forever.
  static constexpr int kFirstRegisters = 65536 / (Cfg::kBlocks * kThreads) / 8 * 8;
  static_assert(kConsumers * Cfg::kConsumerRegisters + Cfg::kProducerRegisters <= (kConsumers + 1) * kFirstRegisters);
};

// What the exponentials of a tile's keys need: scales of K, log2 of scales of V, and one over these.
struct KeyFactors {
  float scale[kTile], log2_value[kTile], inverse_value[kTile];
};

// Two neighbours in shared memory. The compiler must not load a whole tile's ahead: registers are short.
__device__ __forceinline__ void load_pair(const float* from, float (&x)[2]) {
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x[0]), "=f"(x[1]) : "r"(ptx::shared_address(from)));
}

// What a row part knows of its work and rows. It is in shared memory since registers are what the kernel lacks.
struct Rows {
  Work work;
  int whole_begin, whole_end;      // keys that all rows attend to
  float unit;                      // the scale of V, with kScalesAhead
  int begin[64], end[64];          // keys of a row
  float factor[64];                // from raw scores to exponents of two
};

// Of a consumer warpgroup's rows.
struct Sums {
  float max[64], sum[64];          // of a chunk that has ended
  float all_max[64], all_sum[64];  // of the chunks before it
};

// What the warpgroup of a row tile of few rows exchanges (few_rows.cuh).
template <int kRows>
struct Few {
  alignas(16) unsigned char weights[kTile / 16][kRows][16];  // in E4M3, of a group of V's keys
  alignas(16) float numbers[kRows][kTile + 4];               // the weights; rows begin in different banks
  float tops[2][4][kRows];                                   // maxima of each warp's keys, of two tiles in turn
};
template <>
struct Few<0> {};

// Stages of V that hold rows, or what comes behind the last of them.
template <int kStages>
struct RowStages {
  ptx::Mbarrier full[kStages];
  int end[kStages];
};
template <>
struct RowStages<0> {};

template <class T>
struct Storage {
  alignas(1024) unsigned char q[T::kRowParts][T::kPanels][T::kPartRows * T::kPanel];
  alignas(1024) unsigned char k[T::kStages][T::kPanels][kTile * T::kPanel];
  alignas(1024) unsigned char v[T::kStages][kTile / 16][T::kGroupBytes];
  alignas(16) unsigned char raw_q[T::kRawRows > 0 ? T::kRawRows * T::kRawBytes : 16];
  // Sums over chunks, four to an element: each is of one thread, which alone accesses it.
  alignas(16) float4 totals[T::kSharedTotals ? T::kConsumers * (T::kColumns / 2 - T::kHeld) / 4 : 1]
                           [T::kSharedTotals ? 128 : 1];
  KeyFactors factors[T::kTokenScales ? T::kFactorStages : 1];
  Work next;  // the work whose Q is in raw_q; without chunks there is no more
  float next_scales[2];  // of its K and V, with kScalesAhead
  Rows rows[T::kRowParts];
  Sums sums[T::kConsumers];
  Few<T::kFewRows> few;
  Work pieces[2];  // of row tiles that other blocks have worked on too: the first and the last
  int piece_count;
  ptx::Mbarrier k_full[T::kStages], k_empty[T::kStages], v_full[T::kStages], v_empty[T::kStages];
  ptx::Mbarrier factors_full[T::kFactorStages], q_full, q_empty;
  RowStages<T::kTurnsAhead ? T::kStages : 0> rows_of_v;
};

// K-major operand of V in shared memory: matrices of 8 columns by 16 keys of 128 bytes each, without a swizzle.
template <class T>
struct ValueOperand {
  static constexpr unsigned kKeysStep = T::kGroupBytes / 16, kColumnsStep = 128 / 16;
  unsigned low;
  __device__ explicit ValueOperand(const void* smem) : low(ptx::shared_address(smem) >> 4 | kKeysStep << 16) {}
  __device__ __forceinline__ unsigned long long at(unsigned bytes) const {
    return static_cast<unsigned long long>(kColumnsStep) << 32 | (low + bytes / 16);
  }
};

// An operand's tile in a stage. Apart from the products, so that each of them adds a constant to it and no more.
template <unsigned kStageBytes, class Operand>
__device__ __forceinline__ Operand stage_of(Operand tiles, int stage) {
  tiles.low += stage * (kStageBytes / 16);
  return tiles;
}

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

__device__ __forceinline__ Plan plan_of(const AttentionParams& p) {
  return {p.plan, static_cast<int>(gridDim.x), p.most_tiles, p.abreast};
}

// By the producer's first warp: says which work is next, and fetches its Q.
template <class T>
__device__ __forceinline__ void fetch_queries(const AttentionParams& p, Storage<T>& shared, const Work& work) {
  const int lane = threadIdx.x % 32, group = p.batch.group;
  const int stop = work.tile.rows(T::kRows, group), rows = stop <= T::kRawRows ? stop : 0;
  if (lane == 0) {
    shared.next = work;
    shared.q_full.arrive_expect(rows * T::kRawBytes);
  }
  __syncwarp();
  for (int r = lane; r < rows; r += 32) {
    const int row = work.tile.first_row + r, token = p.batch.token(row), head = work.head * group + row - token * group;
    const long long at = (work.tile.q_begin + token) * p.q_token + head * p.q_head;
    ptx::bulk_load(shared.raw_q + r * T::kRawBytes,
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

// Says that there is no more work.
template <class T>
__device__ __forceinline__ void end_scales(Storage<T>& shared, unsigned q_parity) {
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
  end_scales(shared, q_parity);
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

// Starts copying rows of a page of V into a stage, where its keys begin at `slot`.
template <class T>
__device__ __forceinline__ void fetch_rows(const AttentionParams& p, unsigned char* stage, ptx::Mbarrier& full,
                                           const ptx::TensorMap& v_map, int slot, int head, int page) {
  if constexpr (T::kTurnsValues && T::kPanels > 1) {  // panels of 16 keys side by side, to be turned in place
    for (int key = 0; key < p.page; key += 16) {
      for (int i = 0; i < T::kPanels; ++i) {
        ptx::tma_load_4d(stage + (slot + key) * T::kHeadDim + i * 16 * T::kPanel, v_map, full, i * T::kPanel, key, head,
                         page);
      }
    }
  } else {
    for (int i = 0; i < T::kPanels; ++i) {
      ptx::tma_load_4d(stage + (i * kTile + slot) * T::kPanel, v_map, full, i * T::kPanel, 0, head, page);
    }
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
  unsigned q_parity = 0;
  for (Work work; schedule.get(plan, p.kv_heads, work);) {
    const int begin = work.tile.key_begin, end = work.tile.key_end;
    const BlockTable table(p, work.tile.sequence);
    const int stop = work.stop_tile();
    const auto has = [&](int page) { return lane < pages && page * p.page < end && (page + 1) * p.page > begin; };
    int tile = work.first_tile();
    int page = tile * pages + lane, next = has(page) ? table.entry(page) : 0;
    // Q is asked for before K and V, of which so much is on its way that Q would come late.
    if constexpr (kKeys) {
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
            ptx::tma_load_4d(shared.k[s][i] + lane * p.page * T::kPanel, k_map, shared.k_full[s], i * T::kPanel, 0,
                             work.head, number);
          }
        }
      }
      if constexpr (kValues) {
        ptx::Mbarrier& full = value_barrier(shared, s);
        shared.v_empty[s].wait(ring.parity ^ 1);
        if (lane == 0) {
          if constexpr (T::kTurnsAhead) shared.rows_of_v.end[s] = 0;
          full.arrive_expect(bytes);
        }
        __syncwarp();
        if (needed) {
          if constexpr (T::kRowValues) {
            fetch_rows<T>(p, shared.v[s][0], full, v_map, lane * p.page, work.head, number);
          } else {
            const long long at = number * p.v_page + work.head * p.v_head;
            ptx::bulk_load(shared.v[s][0] + lane * page_bytes, values + at, page_bytes, full);
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
  if constexpr (!kKeys) {
    if constexpr (T::kScalesAhead && T::kTurnsAhead) end_scales(shared, q_parity);
    return;
  }
  shared.q_empty.wait(q_parity ^ 1);
  if (lane == 0) {
    shared.next = Work{};
    shared.q_full.arrive();
  }
}

// By a warp of kWarps that do so: turns rows of V in the stage where they lie.
template <class T, int kWarps>
__device__ __forceinline__ void turn_stage(unsigned char* stage, int warp) {
  constexpr int kParts = kTile / 16 * T::kPanels;
#pragma unroll 1
  for (int part = warp; part < kParts; part += kWarps) turn_rows<T::kPanel>(stage + part * 16 * T::kPanel);
  ptx::fence_proxy_async();
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

// With kTokenScales the producer's second warp, and the third if there are two for it: the factors of a tile's keys.
template <class T>
__device__ __forceinline__ void fetch_factors(const AttentionParams& p, Storage<T>& shared) {
  constexpr int kThreads = 32 * T::kFactorWarps, kOwn = kTile / kThreads;
  const int thread = threadIdx.x % 128 - 32;
  Ring<T::kFactorStages> ring;
  unsigned tiles = 0;  // so far
  const Plan plan = plan_of(p);
  Schedule schedule;
  schedule.start(plan);
  for (Work work; schedule.get(plan, p.kv_heads, work);) {
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
          scales[i] = p.k_scale[page * p.k_scale_strides[0] + work.head * p.k_scale_strides[1] + slot];
          of_values[i] = p.v_scale[page * p.v_scale_strides[0] + work.head * p.v_scale_strides[1] + slot];
        }
      }
      if constexpr (T::kStages > 1) {
        shared.v_empty[s].wait(ring.parity ^ 1);
      } else if (tiles >= 2) {
        shared.v_empty[0].wait(tiles % 2);  // of the tile two before
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
}

// A consumer warpgroup. A thread holds, of rows t / 4 and t / 4 + 8 of its warp's 16 (t: its lane), columns
// 8 j + 2 (t % 4) and the next one, for all j. Register i of scores and of O belongs to row i / 2 % 2 of the two.
template <class T>
struct Consumer {
  static constexpr int kScores = kTile / 2, kSteps = kTile / 32, kOut = T::kColumns / 2;
  static constexpr int kThreads = 128 * T::kConsumers;

  const AttentionParams& p;
  Storage<T>& shared;
  Rows& rows;
  Sums& sums;
  const int row_part, column_part;
  const ptx::Operand<T::kPanel> q_tile, k_tiles;
  const ValueOperand<T> v_tiles;
  Ring<T::kStages> k_ring, v_ring;
  Ring<T::kFactorStages> factors_ring;
  unsigned q_parity = 0;

  float o[kOut], max[2], sum[2];  // of the present chunk; sum is of this thread's columns
  float held[T::kHeld > 0 ? T::kHeld : 1];  // of the sums over the chunks before it
  bool begun;                     // whether there is such a chunk
  int whole_first, whole_stop;    // tiles whose keys all rows attend to
  int clear_first, clear_last;    // tiles of whose values some are to be cleared, or -1

  __device__ __forceinline__ Consumer(const AttentionParams& p, Storage<T>& shared, int warpgroup)
      : p(p),
        shared(shared),
        rows(shared.rows[warpgroup / T::kColumnParts]),
        sums(shared.sums[warpgroup]),
        row_part(warpgroup / T::kColumnParts),
        column_part(warpgroup % T::kColumnParts),
        q_tile(shared.q[row_part]),
        k_tiles(shared.k),
        v_tiles(shared.v[0][0] + column_part * T::kColumns * 16) {}

  __device__ __forceinline__ static void arrive(ptx::Mbarrier& barrier) {
    if (threadIdx.x % 32 == 0) barrier.arrive();
  }
  __device__ __forceinline__ int thread() const { return threadIdx.x % T::kRowThreads; }
  __device__ __forceinline__ void sync_rows() const { ptx::barrier_sync(Barrier::kRows + row_part, T::kRowThreads); }
  // The first of the thread's two rows, of the row part's 64.
  __device__ __forceinline__ static int row() { return threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4; }

  // The next work: whether there is any, what its rows attend to, and their Q, quantized.
  __device__ __forceinline__ bool begin_work() {
    sync_rows();  // the last work is over
    shared.q_full.wait(q_parity);
    q_parity ^= 1;
    const Work work = shared.next;
    if (work.chunks == 0) return false;
    if (thread() == 0) {
      rows.work = work;
      if constexpr (T::kScalesAhead) rows.unit = shared.next_scales[1];
    }
    const RowTile& tile = work.tile;
    const int group = p.batch.group, first = tile.first_row + row_part * 64, stop = tile.q_len * group;
    // Rows behind the last have its keys, and are not written.
    const auto token_of = [&](int row) { return p.batch.token(min(first + row, stop - 1)); };
    float scale = p.softmax_scale;
    const auto of_head = [&](const float* scales, const int(&strides)[2]) {
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
    if (thread() < 64) {
      rows.begin[thread()] = p.batch.key_begin(token_of(thread()), tile.q_len, tile.kv_len);
      rows.end[thread()] = p.batch.key_end(token_of(thread()), tile.q_len, tile.kv_len);
    } else if (thread() == 64) {
      rows.whole_begin = p.batch.key_begin(token_of(63), tile.q_len, tile.kv_len);
      rows.whole_end = p.batch.key_end(token_of(0), tile.q_len, tile.kv_len);
    }
    quantize_queries(work, scale, signs);
    ptx::fence_proxy_async();
    sync_rows();
    if (thread() == 0) shared.q_empty.arrive();
    return true;
  }

  // By the threads that share rows: a row's numbers divided by its largest, as E4M3, into the swizzled tile that the
  // products read, and the factors of its scores. Eight numbers are a thread's, of several rows, all at the same time:
  // what a row waits for, the others hide. Rows behind the last become 0.
  __device__ __forceinline__ void quantize_queries(const Work& work, float scale, unsigned signs) {
    constexpr int kLanes = T::kHeadDim / 8, kAtOnce = T::kRowThreads / kLanes;  // threads of a row; rows
    constexpr int kPasses = (T::kPartRows + kAtOnce - 1) / kAtOnce;
    static_assert(kPasses <= kLanes, "a lane divides for one pass");
    constexpr int kBytes = T::kRawBytes / T::kHeadDim;
    const RowTile& tile = work.tile;
    const int group = p.batch.group, first = tile.first_row + row_part * 64, stop = tile.q_len * group;
    const int lane = thread() % kLanes, column = lane * 8, first_row = thread() / kLanes;
    const bool fetched = tile.rows(T::kRows, group) <= T::kRawRows;
    uint4 words[kPasses];
#pragma unroll
    for (int i = 0; i < kPasses; ++i) {
      const int row = first + first_row + i * kAtOnce, token = p.batch.token(row), head = row - token * group;
      const long long at = (tile.q_begin + token) * p.q_token + (work.head * group + head) * p.q_head + column;
      const unsigned char* const from =
          fetched ? shared.raw_q + (row - tile.first_row) * T::kRawBytes + column * kBytes
                  : static_cast<const unsigned char*>(p.q) + at * kBytes;
      words[i] = make_uint4(0, 0, 0, 0);
      if (row >= stop || first_row + i * kAtOnce >= T::kPartRows) continue;
      if constexpr (T::kCodedQueries) {
        const uint2 codes = *reinterpret_cast<const uint2*>(from);
        words[i].x = codes.x;
        words[i].y = codes.y;
      } else {
        words[i] = *reinterpret_cast<const uint4*>(from);
      }
    }
    float largest[kPasses], inverse = 1.0f, of_row = 1.0f;
    if constexpr (!T::kCodedQueries) {
#pragma unroll
      for (int i = 0; i < kPasses; ++i) {
        const typename T::In(&in)[8] = reinterpret_cast<const typename T::In(&)[8]>(words[i]);
        largest[i] = 0.0f;
#pragma unroll
        for (int j = 0; j < 8; ++j) largest[i] = fmaxf(largest[i], fabsf(static_cast<float>(in[j])));
      }
#pragma unroll
      for (int step = 1; step < kLanes; step *= 2) {
#pragma unroll
        for (float& x : largest) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, step));
      }
      float mine = largest[0];  // a row's divisions are by the lane whose number is the row's pass
#pragma unroll
      for (int i = 1; i < kPasses; ++i) mine = lane == i ? largest[i] : mine;
      mine = mine > 0.0f ? fmaxf(mine, 448.0f * kLeastScale) : 448.0f;
      inverse = __fdiv_rn(448.0f, mine);
      of_row = __fdiv_rn(mine, 448.0f);
    }
#pragma unroll
    for (int i = 0; i < kPasses; ++i) {
      const int r = first_row + i * kAtOnce;
      uint2 codes = make_uint2(words[i].x, words[i].y);
      if constexpr (!T::kCodedQueries) {
        const typename T::In(&in)[8] = reinterpret_cast<const typename T::In(&)[8]>(words[i]);
        const float by = __shfl_sync(0xffffffffu, inverse, i, kLanes);
        float x[8];
#pragma unroll
        for (int j = 0; j < 8; ++j) x[j] = static_cast<float>(in[j]) * by;
        const float low[4] = {x[0], x[1], x[2], x[3]}, high[4] = {x[4], x[5], x[6], x[7]};
        codes = make_uint2(ptx::pack_e4m3(low), ptx::pack_e4m3(high));
      }
      if (r >= T::kPartRows) continue;
      codes.x ^= signs;
      codes.y ^= signs;
      const int turn = T::kPanel == 128 ? r % 8 : r / 2 % 4;  // the copy engine's swizzle
      unsigned char* const to = shared.q[row_part][column / T::kPanel] + r * T::kPanel;
      *reinterpret_cast<uint2*>(to + ((column % T::kPanel / 16) ^ turn) * 16 + column % 16) = codes;
      if (lane == i) {
        const float factor = of_row * scale;
        rows.factor[r] = factor < kLeast ? kLeast : factor;
      }
    }
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

  // Clears values of keys that no row attends to: a cache holds anything behind a sequence, and 0 times NaN is NaN.
  __device__ __forceinline__ void clear_values(int first, int stop) {
    constexpr int kOrder[16] = {0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15};
    for (int i = threadIdx.x; i < kTile / 16 * T::kHeadDim; i += kThreads) {
      const int group = i / T::kHeadDim, key = group * 16;
      if (key >= first && key + 16 <= stop) continue;
      unsigned kept[4] = {};
#pragma unroll
      for (int j = 0; j < 16; ++j) {
        const int k = key + kOrder[j];
        if (k >= first && k < stop) kept[j / 4] |= 0xffu << j % 4 * 8;
      }
      uint4* const at = reinterpret_cast<uint4*>(shared.v[v_ring.stage][group] + i % T::kHeadDim * 16);
      const uint4 x = *at;
      *at = make_uint4(x.x & kept[0], x.y & kept[1], x.z & kept[2], x.w & kept[3]);
    }
    ptx::fence_proxy_async();
    ptx::barrier_sync(Barrier::kConsumers, kThreads);
  }
  // The same where a stage holds rows.
  __device__ __forceinline__ void clear_rows(int first, int stop) {
    constexpr int kChunks = T::kPanel / 16;
    for (int i = threadIdx.x; i < T::kPanels * kTile * kChunks; i += kThreads) {
      const int key = i / kChunks % kTile;
      if (key >= first && key < stop) continue;
      reinterpret_cast<uint4*>(shared.v[v_ring.stage])[i] = make_uint4(0, 0, 0, 0);
    }
    ptx::barrier_sync(Barrier::kConsumers, kThreads);
  }

  // The largest scores of a thread's two rows, if above the chunk's so far. As integers, three at a time and starting
  // from 0, positive floats compare as they should. Where 0 comes out and the row had nothing above 0 before, all are
  // negative: of these the largest has the smallest bits. Two chains for each row: one would wait for itself.
  __device__ __forceinline__ void find_maxima(const float (&s)[kScores], float (&top)[2]) const {
    int tops[2][2] = {};
#pragma unroll
    for (int i = 0; i < kScores; i += 2) {
      int& x = tops[i / 2 % 2][i / 4 % 2];
      x = __vimax3_s32(x, __float_as_int(s[i]), __float_as_int(s[i + 1]));
    }
    const int whole[2] = {::max(tops[0][0], tops[0][1]), ::max(tops[1][0], tops[1][1])};
    top[0] = __int_as_float(whole[0]);
    top[1] = __int_as_float(whole[1]);
    const int negative = ((whole[0] == 0) & (max[0] < 0.0f)) | ((whole[1] == 0) & (max[1] < 0.0f));  // no branch
    if (__any_sync(0xffffffffu, negative)) {
      unsigned least[2] = {0xff800000u, 0xff800000u};  // of -inf
#pragma unroll
      for (int i = 0; i < kScores; i += 2) {
        unsigned& x = least[i / 2 % 2];
        x = __vimin3_u32(x, __float_as_uint(s[i]), __float_as_uint(s[i + 1]));
      }
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        if (whole[r] == 0) top[r] = __uint_as_float(least[r]);
      }
    }
  }

  // Turns raw scores into weights, and the chunk's maxima and sums into those with this tile; gives the factors for
  // what came before. first_key: of the tile.
  template <bool kMasked>
  __device__ __forceinline__ void weigh(float (&s)[kScores], const KeyFactors* keys, int first_key,
                                        float (&rescale)[2]) {
    const int column = threadIdx.x % 4 * 2;
    const float factor[2] = {rows.factor[row()], rows.factor[row() + 8]};
    float top[2], bias[2];
    if constexpr (T::kExponents) {
#pragma unroll
      for (int i = 0; i < kScores; i += 4) {  // two keys, of both rows
        const int key = i / 4 * 8 + column;
        float scales[2] = {1.0f, 1.0f}, log2_values[2] = {0.0f, 0.0f};
        if constexpr (T::kTokenScales) {
          load_pair(&keys->scale[key], scales);
          load_pair(&keys->log2_value[key], log2_values);
        }
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float x = s[i + j] * scales[j % 2];
          s[i + j] = T::kSoftcap ? fmaf(ptx::tanh(x * factor[j / 2]), p.softcap * kLog2E, log2_values[j % 2])
                                 : fmaf(x, factor[j / 2], log2_values[j % 2]);
        }
      }
    }
    if constexpr (kMasked) {
      const int before = first_key + column;
      const int begin[2] = {rows.begin[row()] - before, rows.begin[row() + 8] - before};
      const int end[2] = {rows.end[row()] - before, rows.end[row() + 8] - before};
#pragma unroll
      for (int i = 0; i < kScores; ++i) {
        const int key = i / 4 * 8 + i % 2;
        s[i] = key >= begin[i / 2 % 2] && key < end[i / 2 % 2] ? s[i] : -CUDART_INF_F;
      }
    }
    find_maxima(s, top);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if constexpr (!T::kExponents) top[r] *= factor[r];
    }
#pragma unroll
    for (int step = 1; step < 4; step *= 2) {
      const float other[2] = {__shfl_xor_sync(0xffffffffu, top[0], step), __shfl_xor_sync(0xffffffffu, top[1], step)};
      top[0] = fmaxf(top[0], other[0]);
      top[1] = fmaxf(top[1], other[1]);
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      top[r] = top[r] > max[r] + kSlack ? top[r] : max[r];
      const float base = top[r] == -CUDART_INF_F ? 0.0f : top[r];
      rescale[r] = ptx::ex2(max[r] - base);
      bias[r] = kOffset - base;
      max[r] = top[r];
    }
    float sums[2][4] = {{sum[0] * rescale[0], 0.0f, 0.0f, 0.0f}, {sum[1] * rescale[1], 0.0f, 0.0f, 0.0f}};
#pragma unroll
    for (int i = 0; i < kScores; i += 4) {
      float inverse_values[2];
      if constexpr (T::kTokenScales) load_pair(&keys->inverse_value[i / 4 * 8 + column], inverse_values);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int r = j / 2;
        float &x = sums[r][i / 4 % 4], &w = s[i + j];
        w = ptx::ex2(T::kExponents ? w + bias[r] : fmaf(w, factor[r], bias[r]));
        x = T::kTokenScales ? fmaf(w, inverse_values[j % 2], x) : x + w;
      }
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) sum[r] = (sums[r][0] + sums[r][1]) + (sums[r][2] + sums[r][3]);
  }

  __device__ __forceinline__ static void pack(const float (&w)[kScores], unsigned (&weights)[kSteps][4]) {
#pragma unroll
    for (int t = 0; t < kSteps; ++t) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {  // row i % 2, columns 16 (i / 2) on
        const int first = 16 * t + 8 * (i / 2) + 2 * (i % 2);
        const float four[4] = {w[first], w[first + 1], w[first + 4], w[first + 5]};
        weights[t][i] = ptx::pack_e4m3(four);
      }
    }
  }

  __device__ __forceinline__ void start_sums() {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      max[r] = -CUDART_INF_F;
      sum[r] = 0.0f;
    }
  }

  // Keeps the maxima and sums of the present chunk in shared memory, for end_chunk. All lanes of a quad have the same.
  __device__ __forceinline__ void keep_sums() {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float total = sum[r] + __shfl_xor_sync(0xffffffffu, sum[r], 1);
      total += __shfl_xor_sync(0xffffffffu, total, 2);
      sums.max[row() + 8 * r] = max[r];
      sums.sum[row() + 8 * r] = total;
    }
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
        const int at = row() + 8 * r;
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

  // A partial result: O of slot_rows rows, their maxima, their sums.
  __device__ __forceinline__ float* partial(int slot) const {
    return p.partials + static_cast<long long>(slot) * p.slot_rows * (T::kHeadDim + 2);
  }

  // A sequence with more queries than was said has more rows than there is memory for: they are left out.
  __device__ __forceinline__ int partial_rows(const RowTile& tile) const {
    return min(tile.rows(T::kRows, p.batch.group), p.slot_rows);
  }

  // Leaves what is in `o`.
  __device__ __forceinline__ void leave(int slot, const float (&of_max)[64], const float (&of_sum)[64]) const {
    float* const to = partial(blockIdx.x * (p.slots + 1) + min(slot, p.slots));  // more only with a wrong plan
    const int stop = partial_rows(rows.work.tile), quad = threadIdx.x % 4;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int at = row_part * 64 + row() + 8 * r;
      if (at >= stop) continue;
      float* const out = to + at * T::kHeadDim + column_part * T::kColumns + 2 * quad;
#pragma unroll
      for (int j = 0; j < T::kColumns / 8; ++j) {
        *reinterpret_cast<float2*>(out + 8 * j) = make_float2(o[4 * j + 2 * r], o[4 * j + 2 * r + 1]);
      }
      if (quad == 0 && column_part == 0) {
        to[p.slot_rows * T::kHeadDim + at] = of_max[row() + 8 * r];
        to[p.slot_rows * (T::kHeadDim + 1) + at] = of_sum[row() + 8 * r];
      }
    }
  }

  // What one of O's numbers stands for, of a work.
  __device__ __forceinline__ float unit_of(const Work& work) const {
    if constexpr (T::kTokenScales) return 1.0f;
    return p.v_scale[static_cast<long long>(work.tile.sequence) * p.v_scale_strides[0] +
                     work.head * p.v_scale_strides[1]];
  }

  // A row's factor of O, and its log-sum-exp if asked for, from the maximum and sum over all keys.
  struct Finish {
    float before, factor;  // O is multiplied by one, then by the other
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

  // Writes the rows of a tile that this block has worked on alone.
  __device__ __forceinline__ void store(const Work& work) {
    const int stop = work.tile.rows(T::kRows, p.batch.group), quad = threadIdx.x % 4;
    const float unit = T::kScalesAhead ? rows.unit : unit_of(work);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int of_part = row() + 8 * r, at = row_part * 64 + of_part;
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
    float4 values[kValues];                // [result][element]
    float2 factors[kEntries];              // [row][result]: of what came before, and of the result
    float max[kEntries], sum[kEntries];    // [row][result]
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
    const int next_unit = Plan::begin_of(first_run + 1, runs, units), results = first_unit + work.chunks - next_unit + 1;
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
      keep_sums();
      start_sums();
    }
    weigh<kMasked>(s, factors, tile * kTile, rescale);
    if constexpr (!kFirst) {
      ptx::wgmma_wait<0>();
      ptx::pin(o);
      release_values();
    }
    pack(s, weights);  // not before: P V was reading them
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
      T::kRowValues && !T::kTurnsValues ? clear_rows(first, stop) : clear_values(first, stop);
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
    keep_sums();
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
      start_sums();
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        sums.all_max[row() + 8 * r] = -CUDART_INF_F;
        sums.all_sum[row() + 8 * r] = 0.0f;
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

// By 128 threads of each block: what the first loads wait for. Block tables are shared out among the blocks.
template <class T>
__device__ __forceinline__ void prefetch(const AttentionParams& p, const ptx::TensorMap& k_map,
                                         const ptx::TensorMap& v_map) {
  if (threadIdx.x % 128 == 0) {
    ptx::prefetch_map(k_map);
    if constexpr (T::kRowValues) ptx::prefetch_map(v_map);
  }
  const long long entries = (p.batch.sequences - 1LL) * p.table_row + p.table_entries;
  const long long entry = (blockIdx.x * 128LL + threadIdx.x % 128) * 32;  // of a line
  if (entry < entries) ptx::prefetch_l2(p.block_table + entry);
}

template <class T>
struct FewRows;

// Grid: kBlocks per multiprocessor. Block: 128 threads for each consumer warpgroup and 128 for the producer.
// v_map: of V in rows, else anything.
template <class Cfg>
__device__ __forceinline__ void attention(const AttentionParams& p, const ptx::TensorMap& k_map,
                                          const ptx::TensorMap& v_map) {
  using T = Traits<Cfg>;
  extern __shared__ __align__(1024) unsigned char smem[];
  Storage<T>& shared = *reinterpret_cast<Storage<T>*>(smem);
  static_assert(sizeof(Storage<T>) == Cfg::kSmemBytes, "the plan of shared memory in Python differs");
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);  // known to be uniform
  if (warpgroup == T::kConsumers) prefetch<T>(p, k_map, v_map);
  if (threadIdx.x == 0) {
    shared.piece_count = 0;
    constexpr int kWarps = 4 * T::kConsumers;
    shared.q_full.init(T::kScalesAhead ? 2 : 1);
    shared.q_empty.init(T::kRowParts);
    for (int s = 0; s < T::kStages; ++s) {
      shared.k_full[s].init(1);
      shared.v_full[s].init(T::kTurnsAhead ? T::kTurners : 1);
      if constexpr (T::kTurnsAhead) shared.rows_of_v.full[s].init(1);
      shared.k_empty[s].init(kWarps);
      shared.v_empty[s].init(kWarps);
    }
    for (int s = 0; s < T::kFactorStages; ++s) shared.factors_full[s].init(T::kFactorWarps);
    ptx::fence_mbarrier_init();
  }
  for (int i = threadIdx.x; i < static_cast<int>(sizeof(shared.q) / 16); i += T::kThreads) {
    reinterpret_cast<uint4*>(shared.q)[i] = make_uint4(0, 0, 0, 0);
  }
  for (int i = threadIdx.x; i < 64 * T::kRowParts; i += T::kThreads) shared.rows[i / 64].factor[i % 64] = 1.0f;
  ptx::fence_proxy_async();
  __syncthreads();
  ptx::griddepcontrol_wait();  // so far nothing was read that kernels before this one may have written
  if (warpgroup == T::kConsumers) {
    if constexpr (T::kExchangesRegisters) ptx::warpgroup_reg_dealloc<T::kProducerRegisters>();
    const int warp = threadIdx.x / 32 % 4;
    if (T::kTurnsAhead && warp >= T::kFirstTurner && warp < T::kFirstTurner + T::kTurners) {
      if constexpr (T::kTurnsAhead) turn_values(shared);
    } else if (warp == 0) {
      fetch<T, true, !T::kValuesApart>(p, shared, k_map, v_map);
    } else if (warp == 3) {
      if constexpr (T::kValuesApart) fetch<T, false, true>(p, shared, k_map, v_map);
    } else if constexpr (T::kTokenScales) {
      fetch_factors<T>(p, shared);
    } else if constexpr (T::kScalesAhead) {
      if (warp == 1) fetch_scales<T>(p, shared);
    }
  } else if constexpr (T::kFewRows > 0) {
    if constexpr (T::kExchangesRegisters) ptx::warpgroup_reg_alloc<T::kConsumerRegisters>();
    FewRows<T>(p, shared).run();
  } else {
    ptx::warpgroup_reg_alloc<T::kConsumerRegisters>();
    Consumer<T>(p, shared, warpgroup).run();
  }
}

}  // namespace greenfast::serving

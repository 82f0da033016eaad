// What is fixed when attention over a paged cache is compiled, and what its warps share: Cfg, which Python renders, what
// follows from it, and shared memory.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "ptx/mbarrier.cuh"
#include "serving/plan.cuh"

namespace greenfast::serving {

// The weight of a score at a row's maximum is 56 = 2^kOffset. The maximum follows a tile only where that exceeds it by
// more than kSlack, or O would be rescaled most of the time (Dao, FlashAttention-4, 2026); so weights go up to 448, which
// is E4M3's largest number.
constexpr float kSlack = 3.0f, kOffset = 8.807355f - kSlack;
constexpr float kLeastScale = 1.88079096e-37f;  // 2^-122, of a row of Q
constexpr float kLeast = 1.17549435e-38f;       // of factors: 0 times -inf would be NaN
constexpr float kLog2E = 1.4426950408889634f, kLn2 = 0.6931471805599453f;

struct Barrier {
  enum {
    kBlock,      // __syncthreads()
    kConsumers,  // all consumer warpgroups
    kRows = 2,   // and the three after it: the warpgroups that share rows
    kTurn = 6    // and the three after it: the turn of a row part
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
//   bool kOverlap          whether P V of a tile runs during the softmax of the next one, or behind its own
//   bool kPingPong         whether row parts start their products one after the other
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
  static constexpr int kConsumerThreads = 128 * kConsumers, kThreads = kConsumerThreads + 128;
  static constexpr int kPartRows = Cfg::kFewRows > 0 ? Cfg::kFewRows : 64;  // of a row part
  static constexpr int kRows = kPartRows * Cfg::kRowParts;
  static constexpr int kPanel = Cfg::kHeadDim < 128 ? Cfg::kHeadDim : 128;  // bytes of a row between swizzles
  static constexpr int kPanels = Cfg::kHeadDim / kPanel;
  static constexpr int kColumns = Cfg::kHeadDim / Cfg::kColumnParts;              // of O, of a warpgroup
  static constexpr int kGroupBytes = Cfg::kHeadDim * 16;                          // of V: 16 keys
  static constexpr int kRowThreads = 128 * Cfg::kColumnParts;                     // that share rows
  static constexpr int kRawBytes = Cfg::kHeadDim * (Cfg::kCodedQueries ? 1 : 2);  // of a row of Q
  static constexpr int kRawTileBytes = Cfg::kRawRows == 0 ? 16 : kRawBytes * Cfg::kRawRows;
  // The factors of a tile are needed before P V of the tile before it is over.
  static constexpr int kFactorStages = Cfg::kStages > 1 ? Cfg::kStages : 2;
  // Whether a warp of the producer fetches the pages of V: one for K and V would wait for room for V before it fetches the
  // next K. A block with few works only begins later for it. And whether one fetches the scales of heads, one work ahead,
  // where it does nothing else, or the pages of V where their rows are turned.
  static constexpr bool kValuesApart = Cfg::kRowParts > 1;
  static constexpr bool kScalesAhead = (kValuesApart || Cfg::kFewRows > 0) && !Cfg::kTokenScales;
  // Rows of V are turned by warps of the producer: by two, or by one where others find the factors of keys. With one
  // stage the consumers would wait for them, and turn the rows themselves.
  static constexpr bool kTurnsValues = Cfg::kRowValues && Cfg::kFewRows == 0;
  static constexpr bool kTurnsAhead = kTurnsValues && Cfg::kStages > 1;
  // Whether V's warp clears what lies beside the keys of a row tile. Where it holds rows, or is no warp of its own, the
  // consumers do, who wait for each other then.
  static constexpr bool kClearsAhead = kValuesApart && !Cfg::kRowValues;
  // Whether a warp of the producer that has nothing else to do says which work is next, fetches its Q and scales, and finds
  // what a merge needs to know: the first keys are then asked for earlier, and no block waits for another's divisions.
  static constexpr bool kWorksApart = Cfg::kFewRows > 0;
  static constexpr int kTurners = Cfg::kTokenScales ? 1 : 2;
  static constexpr int kFirstTurner = !Cfg::kTokenScales ? 1 : kValuesApart ? 2 : 3;
  static constexpr int kFactorWarps = kTurnsAhead && kValuesApart ? 1 : 2;
  // With one stage these warps know by q_empty that the tiles of the work before are over. So consumers must not leave
  // them behind, as they could over works without keys: a barrier tells only one phase from the next.
  static constexpr bool kFactorsFollow = Cfg::kTokenScales && Cfg::kStages == 1;
  static constexpr bool kExchangesRegisters = Cfg::kFewRows == 0 || (Cfg::kRowValues && Cfg::kBlocks > 1);
  // Of a thread's sums over chunks, how many are in registers. At head dim 256 shared memory lacks room for all.
  static constexpr int kHeld = !Cfg::kSharedTotals ? kColumns / 2 : Cfg::kHeadDim == 256 ? 4 : 0;
  // Whether a thread's parts of Q of the next work are copied to the memory of its sums while it writes O, and whether
  // the half of a work's last tile that no row attends to is left out, for which head dim 256 has too much code.
  static constexpr bool kQueriesAhead = Cfg::kSharedTotals && !Cfg::kCodedQueries;
  static constexpr bool kHalfTiles = Cfg::kHeadDim < 256;
  // Whether tiles with and without a mask are one piece of code. At head dim 256 two of each do not fit the instruction
  // cache, and a work runs through most of them once; at 64 the branch costs 4 %.
  static constexpr bool kMaskInStep = Cfg::kHeadDim > 64 && Cfg::kRowParts > 1;
  // Whether tiles of K and V are prefetched to L2 before there is room for them.
  static constexpr bool kPrefetches = Cfg::kStages == 1 && Cfg::kRowParts > 1;
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

// What a row part knows of its work and rows. It is in shared memory since registers are what the kernel lacks.
struct Rows {
  Work work;
  int whole_begin, whole_end;  // keys that all rows attend to
  float unit;                  // the scale of V, with kScalesAhead
  int begin[64], end[64];      // keys of a row
  float factor[64];            // from raw scores to exponents of two
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

// The copies of a tile of V of which the warp that fetches it clears a part.
template <bool kClearsAhead>
struct Landed {
  ptx::Mbarrier full;
};
template <>
struct Landed<false> {};

template <class T>
struct Storage {
  alignas(1024) unsigned char q[T::kRowParts][T::kPanels][T::kPartRows * T::kPanel];
  alignas(1024) unsigned char k[T::kStages][T::kPanels][kTile * T::kPanel];
  alignas(1024) unsigned char v[T::kStages][kTile / 16][T::kGroupBytes];
  alignas(16) unsigned char raw_q[T::kRawTileBytes];
  // Sums over chunks, four to an element: each is of one thread, which alone accesses it.
  alignas(16) float4
      totals[T::kSharedTotals ? T::kConsumers * (T::kColumns / 2 - T::kHeld) / 4 : 1][T::kSharedTotals ? 128 : 1];
  KeyFactors factors[T::kTokenScales ? T::kFactorStages : 1];
  Work next;             // the work whose Q is in raw_q; without chunks there is no more
  float next_scales[2];  // of its K and V, with kScalesAhead
  Rows rows[T::kRowParts];
  Sums sums[T::kConsumers];
  Few<T::kFewRows> few;
  Piece pieces[2];  // of row tiles that other blocks work on too: the first and the last
  int piece_count;
  ptx::Mbarrier k_full[T::kStages], k_empty[T::kStages], v_full[T::kStages], v_empty[T::kStages];
  ptx::Mbarrier factors_full[T::kFactorStages], q_full, q_empty;
  RowStages<T::kTurnsAhead ? T::kStages : 0> rows_of_v;
  Landed<T::kClearsAhead> landed;
};

__device__ __forceinline__ Plan plan_of(const AttentionParams& p) {
  return {p.plan, static_cast<int>(gridDim.x), p.most_tiles, p.abreast};
}

}  // namespace greenfast::serving

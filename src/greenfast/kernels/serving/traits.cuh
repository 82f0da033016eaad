// The compile-time configuration of attention over a paged cache (Cfg, rendered by Python), constants derived from it,
// and the shared-memory map.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "ptx/mbarrier.cuh"
#include "serving/plan.cuh"

namespace greenfast::serving {

// P at the row maximum is 56 = 2^kMaxOffset. The maximum follows a tile only if the tile's maximum exceeds it by more
// than kRescaleThreshold (in log2); otherwise O would be rescaled for most tiles (lazy rescaling: Dao,
// FlashAttention-4, 2026). So P is at most 448, the largest E4M3 number.
constexpr float kRescaleThreshold = 3.0f, kMaxOffset = 8.807355f - kRescaleThreshold;
constexpr float kMinScale = 1.88079096e-37f;   // 2^-122: minimum scale of a row of Q
constexpr float kMinFactor = 1.17549435e-38f;  // minimum score scale: 0 times -inf would be NaN
constexpr float kLog2E = 1.4426950408889634f, kLn2 = 0.6931471805599453f;

struct Barrier {
  enum {
    kBlock,             // __syncthreads()
    kConsumers,         // all consumer warpgroups
    kRows = 2,          // 4 barriers: the warpgroups that share rows
    kWarpScheduler = 6  // 4 barriers: ping-pong order of the warpgroups along M
  };
};

// Members of Cfg:
//   int kHeadDim           64, 128 or 256
//   int kWarpgroupsM       consumer warpgroups along M, of 64 rows each
//   int kWarpgroupsN       consumer warpgroups that share rows and split the columns of O
//   int kDecodeRows        8 or 16: rows of a row tile for decoding (decode_swap_ab.cuh, one warpgroup); else 0
//   int kStages            stages of K, and of V
//   int kBlocksPerSm       resident blocks per multiprocessor
//   int kConsumerRegisters, kProducerRegisters  per thread, after setmaxnreg
//   int kStagedQRows       rows of Q that the producer copies to shared memory; consumers load larger row tiles
//   bool kOverlap          P V of a tile overlaps with the softmax of the next tile
//   bool kPingPong         warpgroups along M issue their products in turn
//   bool kSharedTotals     O summed over chunks is in shared memory, else in registers
//   int kSmemBytes         sizeof(Storage), to check the plan in Python
//   bool kTokenScales      K and V have a scale per token and head, else per head
//   bool kRowMajorV        pages of V are row-major like K's, else grouped (transposed groups of 16 keys)
//   bool kSoftcap          scores s become softcap * tanh(s / softcap)
//   bool kQuantizedQ       Q is E4M3 with a scale per sequence and KV head, else of type In
//   type In, Out           half or __nv_bfloat16
template <class Cfg>
struct Traits : Cfg {
  // Whether rows are the N dimension of the products (decode_swap_ab.cuh).
  static constexpr bool kSwapAB = Cfg::kDecodeRows > 0;
  static constexpr int kConsumers = Cfg::kWarpgroupsM * Cfg::kWarpgroupsN;
  static constexpr int kConsumerThreads = 128 * kConsumers, kThreads = kConsumerThreads + 128;
  static constexpr int kWarpgroupRows = kSwapAB ? Cfg::kDecodeRows : 64;  // of a warpgroup
  static constexpr int kRows = kWarpgroupRows * Cfg::kWarpgroupsM;
  static constexpr int kPanel = Cfg::kHeadDim < 128 ? Cfg::kHeadDim : 128;  // bytes of a swizzled row
  static constexpr int kPanels = Cfg::kHeadDim / kPanel;
  static constexpr int kColumns = Cfg::kHeadDim / Cfg::kWarpgroupsN;  // of O in a warpgroup
  static constexpr int kGroupBytes = Cfg::kHeadDim * 16;              // of a group of 16 keys of V
  static constexpr int kRowThreads = 128 * Cfg::kWarpgroupsN;         // threads that share rows
  static constexpr int kQRowBytes = Cfg::kHeadDim * (Cfg::kQuantizedQ ? 1 : 2);
  static constexpr int kStagedQBytes = Cfg::kStagedQRows == 0 ? 16 : kQRowBytes * Cfg::kStagedQRows;
  // At least 2: scales of a tile are needed before P V of the previous tile has finished.
  static constexpr int kScaleStages = Cfg::kStages > 1 ? Cfg::kStages : 2;
  // kSeparateVWarp: another producer warp loads V. A single warp for K and V would wait for a free V stage before it
  // loads the next K. This delays the start of a block, so blocks with few work items do without.
  //
  // kPrefetchScales: a producer warp loads per-head scales one work item ahead. It is a warp that is otherwise idle, or
  // the V warp if V is transposed.
  static constexpr bool kSeparateVWarp = Cfg::kWarpgroupsM > 1;
  static constexpr bool kPrefetchScales = (kSeparateVWarp || kSwapAB) && !Cfg::kTokenScales;
  // Producer warps transpose row-major V: two, or one if other warps load token scales. With a single stage, consumers
  // would wait for them, so consumers transpose it themselves.
  static constexpr bool kTransposeV = Cfg::kRowMajorV && !kSwapAB;
  static constexpr bool kProducerTransposesV = kTransposeV && Cfg::kStages > 1;
  // The V warp zero-fills keys outside the row tile's key range. If V is row-major or there is no V warp, the consumers
  // do this, with a barrier.
  static constexpr bool kProducerZeroFills = kSeparateVWarp && !Cfg::kRowMajorV;
  // An otherwise idle producer warp selects the next work item, loads its Q and scales, and finds the splits to
  // combine. The loads of K then start earlier, and no block waits for the divisions of another warp.
  static constexpr bool kSchedulerWarp = kSwapAB;
  static constexpr int kNumTransposeWarps = Cfg::kTokenScales ? 1 : 2;
  static constexpr int kFirstTransposeWarp = !Cfg::kTokenScales ? 1 : kSeparateVWarp ? 2 : 3;
  static constexpr int kScaleWarps = kProducerTransposesV && kSeparateVWarp ? 1 : 2;
  // With one stage, the scale warps use q_empty to detect that the previous work item's tiles are consumed. So
  // consumers must not overtake them by a whole phase, as they could for work items without keys: an mbarrier wait can
  // tell only adjacent phases apart.
  static constexpr bool kScaleWarpFollows = Cfg::kTokenScales && Cfg::kStages == 1;
  static constexpr bool kReallocRegisters = !kSwapAB || (Cfg::kRowMajorV && Cfg::kBlocksPerSm > 1);
  // Number of a thread's totals (O summed over chunks) that stay in registers. At head dim 256 shared memory lacks room
  // for all.
  static constexpr int kTotalsInRegs = !Cfg::kSharedTotals ? kColumns / 2 : Cfg::kHeadDim == 256 ? 4 : 0;
  // kPrefetchQ: while a thread writes O, its part of the next Q is copied (cp.async) to the memory of its totals.
  //
  // kHalfTiles: the fully masked half of a last tile is skipped. At head dim 256 this would be too much code.
  static constexpr bool kPrefetchQ = Cfg::kSharedTotals && !Cfg::kQuantizedQ;
  static constexpr bool kHalfTiles = Cfg::kHeadDim < 256;
  // Masked and unmasked tiles share their code and test at run time. At head dim 256 separate copies exceed the
  // instruction cache, and most work items run through each of them once. At head dim 64 the branch costs 4 %.
  static constexpr bool kRuntimeMask = Cfg::kHeadDim > 64 && Cfg::kWarpgroupsM > 1;
  // Tiles of K and V are prefetched to L2 before a stage is free.
  static constexpr bool kPrefetchL2 = Cfg::kStages == 1 && Cfg::kWarpgroupsM > 1;
  // Scores are scaled before the mask. Otherwise they are scaled in the exponential.
  static constexpr bool kScaledScores = Cfg::kTokenScales || Cfg::kSoftcap;
  // setmaxnreg redistributes the registers that the block was launched with. Asking for more would hang.
  static constexpr int kLaunchRegisters = 65536 / (Cfg::kBlocksPerSm * kThreads) / 8 * 8;
  static_assert(kConsumers * Cfg::kConsumerRegisters + Cfg::kProducerRegisters <= (kConsumers + 1) * kLaunchRegisters);
};

// Scales of a tile's keys: K's scale, and log2 and the reciprocal of V's scale.
struct KeyScales {
  float scale[kBlockN], log2_value[kBlockN], inverse_value[kBlockN];
};

// The work item of a warpgroup and its rows. In shared memory, to save registers.
struct Rows {
  Work work;
  int unmasked_begin, unmasked_end;  // key range that all rows attend to
  float v_scale;                     // with kPrefetchScales
  int begin[64], end[64];            // key range of a row
  float scale_log2[64];              // scale of raw scores, times log2(e)
};

// Row maxima and row sums of a consumer warpgroup.
struct RowStats {
  float max[64], sum[64];              // of the last finished chunk
  float total_max[64], total_sum[64];  // of all chunks before it
};

// Data that the warps of the decode warpgroup exchange (decode_swap_ab.cuh).
template <int kRows>
struct DecodeStorage {
  alignas(16) unsigned char p_codes[kBlockN / 16][kRows][16];  // P in E4M3, by groups of 16 keys
  alignas(16) float p_fp32[kRows][kBlockN + 4];                // P in fp32, padded against bank conflicts
  float warp_max[2][4][kRows];                                 // row maxima of each warp's keys, double-buffered
};
template <>
struct DecodeStorage<0> {};

// Stages of row-major V before the transpose. end: the producer has no more tiles.
template <int kStages>
struct RowMajorStages {
  ptx::Mbarrier full[kStages];
  int end[kStages];
};
template <>
struct RowMajorStages<0> {};

// Barrier for the copies of a V tile that its producer warp zero-fills partly.
template <bool kProducerZeroFills>
struct LoadedV {
  ptx::Mbarrier full;
};
template <>
struct LoadedV<false> {};

template <class T>
struct Storage {
  alignas(1024) unsigned char q[T::kWarpgroupsM][T::kPanels][T::kWarpgroupRows * T::kPanel];
  alignas(1024) unsigned char k[T::kStages][T::kPanels][kBlockN * T::kPanel];
  alignas(1024) unsigned char v[T::kStages][kBlockN / 16][T::kGroupBytes];
  alignas(16) unsigned char staged_q[T::kStagedQBytes];
  // O summed over chunks, 4 values per element. Each element belongs to one thread.
  alignas(16) float4 totals[T::kSharedTotals ? T::kConsumers * (T::kColumns / 2 - T::kTotalsInRegs) / 4 : 1]
                           [T::kSharedTotals ? 128 : 1];
  KeyScales key_scales[T::kTokenScales ? T::kScaleStages : 1];
  Work next;             // the work item with its Q in staged_q; chunks == 0: no more work
  float next_scales[2];  // of K and V, with kPrefetchScales
  Rows rows[T::kWarpgroupsM];
  RowStats stats[T::kConsumers];
  DecodeStorage<T::kDecodeRows> decode;
  SplitWork split_works[2];  // row tiles shared with other blocks: at most the first and the last
  int split_count;
  ptx::Mbarrier k_full[T::kStages], k_empty[T::kStages], v_full[T::kStages], v_empty[T::kStages];
  ptx::Mbarrier scales_full[T::kScaleStages], q_full, q_empty;
  RowMajorStages<T::kProducerTransposesV ? T::kStages : 0> row_major_v;
  LoadedV<T::kProducerZeroFills> loaded_v;
};

__device__ __forceinline__ Plan plan_of(const AttentionParams& p) {
  return {p.plan, static_cast<int>(gridDim.x), p.max_tiles, p.parallel_heads};
}

}  // namespace greenfast::serving

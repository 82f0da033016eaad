// The compile-time configuration of the Hopper attention kernel (Cfg, rendered by Python), constants derived from it,
// and the shared-memory map.
//
// Members of Cfg:
//   int kHeadDim            64, 128 or 256: columns of the quantized Q, K and V
//   int kBlockN             keys of a tile, a multiple of 128
//   int kConsumers          consumer warpgroups, of 64 query rows each: 1, 2 or 4
//   int kStages             stages of K, and of V
//   int kOutColumns         columns of O per wgmma; divides kHeadDim
//   int kExp2Emulated       of 16 exponentials, those computed on the FMA pipe: 0, 4, 8, 12 or 16 (see OnlineSoftmax)
//   int kConsumerRegisters, kProducerRegisters  per thread, after setmaxnreg
//   int kSmemBytes          sizeof(Storage), to check the plan in Python
//   bool kPingPong          consumer warpgroups issue their products in turn (see Mainloop)
//   bool kOverlap           P V of a tile overlaps with the softmax of the next
//   bool kPromoteAccum      O is summed over tiles in fp32; else by the tensor cores, with about 14 bits
//   bool kScheduled         the work tiles are a schedule's (ScheduledSequence)
//   bool kListed            a work tile has the key tiles of TileLists. Needs kScheduled and kBlockM 128
//   bool kCausal            row i attends to no key after i + causal_shift
//   bool kWindow            row i attends to no key before i + window_shift
//   bool kSkip              a warpgroup skips tiles of small weights (Mainloop). Needs kScheduled and kBlockN == kRowBlock
//   bool kSinks             each head has a sink
//   bool kLse               writes the log-sum-exp (LSE) of each row
//   bool kScoreMax          and its largest score
//   bool kSumUnroundedP     row sums of P before its rounding to E4M3, else after
//   float kSoftcap          scores s become kSoftcap * tanh(s / kSoftcap); 0: no softcap
//   bool kInt8              Q and K are int8, else E4M3. V and P are E4M3
//   bool kQueryBlockScales  Q has a scale per kQueryBlock rows, else per head
//   bool kKeyBlockScales    K has a scale per kRowBlock keys, else per head
//   bool kFineScales        instead: Q has a scale per row, and K one for each of kKeyGroups groups of kRowBlock keys.
//                           Needs kKeyBlockScales and kBlockN == kRowBlock
//   bool kValueBlockScales  V has a scale per kRowBlock keys. Needs kKeyBlockScales
//   bool kChannelScales     V has a scale per column. Excludes kValueBlockScales
//   bool kFewerColumns      O has fewer columns than kHeadDim
//   type Out                of O: half or __nv_bfloat16
// With QLoadFuseQuant (load_q_input.cuh):
//   int kQColumns           columns of the caller's Q: a multiple of 8, at most kHeadDim
//   type In                 of Q: half or __nv_bfloat16
#pragma once

#include <cuda_fp16.h>

#include "attention/mask.cuh"
#include "common/scale_blocks.cuh"
#include "ptx/mbarrier.cuh"

namespace greenfast {

template <bool kScheduled>
struct SelectSequence {
  using Type = Sequence;
};
template <>
struct SelectSequence<true> {
  using Type = ScheduledSequence;
};

template <class Cfg, class Sequence, bool kListed>
struct SelectMask {
  using Type = KeyMask<Sequence, Cfg::kCausal, Cfg::kWindow>;
};
template <class Cfg, class Sequence>
struct SelectMask<Cfg, Sequence, true> {
  using Type = ListMask;
};

template <class Cfg>
struct FlashTraits : Cfg {
  using Sequence = typename SelectSequence<Cfg::kScheduled>::Type;
  using Keys = decltype(static_cast<Sequence*>(nullptr)->key_rows());
  using Mask = typename SelectMask<Cfg, Sequence, Cfg::kListed>::Type;
  static constexpr int kRows = 64;  // of a warpgroup
  static constexpr int kBlockM = kRows * Cfg::kConsumers;
  static constexpr int kThreads = 128 * (Cfg::kConsumers + 1);
  // A row of a tile in shared memory has at most 128 bytes, the widest swizzle. Longer rows are split into panels.
  static constexpr int kDimPanel = Cfg::kHeadDim < 128 ? Cfg::kHeadDim : 128;
  static constexpr int kDimPanels = Cfg::kHeadDim / kDimPanel;
  static constexpr int kKeyPanel = 128;
  static constexpr int kKeyPanels = Cfg::kBlockN / kKeyPanel;
  // Row sums of P by wgmma, with columns of ones after V. Not if the sums are of P before its rounding, nor if the
  // wgmma already has the maximum width.
  static constexpr bool kRowSumByMma = !Cfg::kSumUnroundedP && Cfg::kOutColumns != 256;
  static constexpr int kRowSumColumns = kRowSumByMma ? 8 : 0;
  // Each tile has its own softmax base, so that small P keep their precision. Not if O would then be rescaled for most
  // tiles although it otherwise is not.
  static constexpr bool kPerTileBase = Cfg::kPromoteAccum || Cfg::kValueBlockScales;
  static constexpr int kValueRows = Cfg::kHeadDim + kRowSumColumns;  // rows of V^T in shared memory

  static_assert(Cfg::kHeadDim % kDimPanel == 0 && Cfg::kBlockN % kKeyPanel == 0, "whole panels");
  static_assert(Cfg::kHeadDim % Cfg::kOutColumns == 0, "whole parts of O");
  static_assert(Cfg::kOverlap ? Cfg::kOutColumns == Cfg::kHeadDim : Cfg::kPromoteAccum,
                "one level of accumulation is overlapped");
  static_assert(!Cfg::kFineScales || (Cfg::kKeyBlockScales && Cfg::kBlockN == kRowBlock),
                "a thread has one group of keys");
  static_assert(!Cfg::kValueBlockScales || (Cfg::kKeyBlockScales && Cfg::kBlockN == kRowBlock),
                "a tile has one acc_scale of V");
  static_assert(!Cfg::kValueBlockScales || !Cfg::kChannelScales, "V has scales of one kind");
  static_assert(!Cfg::kListed || (Cfg::kScheduled && kBlockM == kListedRows && Cfg::kBlockN == kRowBlock &&
                                  !Cfg::kWindow && !Cfg::kCausal && Cfg::kKeyBlockScales && Cfg::kValueBlockScales),
                "a list has tiles of 128 rows and 128 keys");
  static_assert(!Cfg::kSkip || (Cfg::kScheduled && Cfg::kBlockN == kRowBlock && kPerTileBase),
                "only tiles of 128 keys with known largest scores can be skipped");
  static_assert(Cfg::kExp2Emulated == 0 || kRowSumByMma, "halves are not summed");
};

// The shared-memory map: tiles, and the mbarriers between producer and consumers. Loaders of Q may add to it.
template <class Traits>
struct FlashTiles {
  alignas(1024) unsigned char q[Traits::kConsumers][Traits::kDimPanels][Traits::kRows * Traits::kDimPanel];
  alignas(1024) unsigned char k[Traits::kStages][Traits::kDimPanels][Traits::kBlockN * Traits::kDimPanel];
  alignas(1024) unsigned char v[Traits::kStages][Traits::kKeyPanels][Traits::kValueRows * Traits::kKeyPanel];
  ptx::Mbarrier q_full[Traits::kConsumers], q_empty[Traits::kConsumers];
  ptx::Mbarrier k_full[Traits::kStages], k_empty[Traits::kStages], v_full[Traits::kStages], v_empty[Traits::kStages];
  alignas(16) int score_start[4];  // RawScore::kStart, four times; unused without kInt8
};

// With kScheduled also the numbers of the block's next work tiles, from the producer to the consumers.
template <class Traits, bool kScheduled = Traits::kScheduled>
struct FlashStorage : FlashTiles<Traits> {};
template <class Traits>
struct FlashStorage<Traits, true> : FlashTiles<Traits> {
  ptx::Mbarrier next_full[2], next_empty[2];
  int next_tile[2];
};

// The state of a pipeline of kStages stages: the next stage and its mbarrier parity.
template <int kStages>
struct Ring {
  int stage = 0;
  unsigned parity = 0;
  __device__ __forceinline__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

}  // namespace greenfast

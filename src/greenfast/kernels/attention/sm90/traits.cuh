// What is fixed when the Hopper attention kernel is compiled: Cfg, which Python renders, and what follows from it.
//
// Members of Cfg:
//   int kHeadDim            64, 128 or 256 columns of Q, K and V as they are coded
//   int kBlockN             keys of a tile, a multiple of 128
//   int kConsumers          warpgroups that compute, of 64 query rows each: 1, 2 or 4
//   int kStages             tiles of K, and of V, on their way at a time
//   int kOutColumns         columns of O that one product computes; divides kHeadDim
//   int kPolynomials        of 16 exponentials, those on the FMA pipe: 0, 4, 8, 12 or 16 (see OnlineSoftmax)
//   int kConsumerRegisters  of each thread of a consumer warpgroup, and
//   int kProducerRegisters  of the producer warpgroup, from the start of the main loop on
//   int kSmemBytes          of the kernel's Storage: a check of what Python plans
//   bool kPingPong          whether consumer warpgroups start their products one after the other (see Mainloop)
//   bool kOverlap           whether P V of a tile runs during the softmax of the next
//   bool kTwoLevels         whether the sums over tiles are float32, not the tensor cores' own of about 14 bits
//   bool kCausal            whether row i attends to keys 0 .. i + causal_shift alone
//   bool kLse               whether the log-sum-exp of each row is written
//   bool kExactSums         whether weights are summed before they are rounded
//   float kSoftcap          scores s become kSoftcap * tanh(s / kSoftcap), or with 0 stay
//   bool kInt8              whether codes of Q and K are int8, or E4M3. Those of V, and weights, are E4M3
//   bool kQueryBlockScales  whether each kQueryBlock rows of Q have a scale, or each head
//   bool kKeyBlockScales    whether each kRowBlock keys have a scale of K, or each head
//   bool kFineScales       whether instead each row of Q and each of kKeyGroups groups of kRowBlock keys has; with
//                          kKeyBlockScales, and tiles of kRowBlock keys
//   bool kValueBlockScales  the same of V, with kKeyBlockScales
//   bool kChannelScales     whether each column of V has a scale; not with kValueBlockScales
//   bool kFewerColumns      whether O has fewer columns than kHeadDim
//   type Out                of O: half or __nv_bfloat16
// With InputQueries (load_q_input.cuh):
//   int kQueryColumns       columns of Q as its caller has it: a multiple of 8, up to kHeadDim
//   type In                 its type: half or __nv_bfloat16
// With RowMajorValues (load_v_row_major.cuh):
//   int kRowStages          tiles of V in rows on their way at a time
#pragma once

#include <cuda_fp16.h>

#include "attention/mask.cuh"
#include "common/scale_blocks.cuh"
#include "ptx/mbarrier.cuh"

namespace greenfast {

template <class Cfg>
struct FlashTraits : Cfg {
  using Mask = KeyMask<Cfg::kCausal>;
  static constexpr int kRows = 64;  // of a warpgroup
  static constexpr int kBlockM = kRows * Cfg::kConsumers;
  static constexpr int kThreads = 128 * (Cfg::kConsumers + 1);
  // A row of a tile in shared memory is at most 128 bytes, the widest swizzle; longer ones are cut into panels.
  static constexpr int kDimPanel = Cfg::kHeadDim < 128 ? Cfg::kHeadDim : 128;
  static constexpr int kDimPanels = Cfg::kHeadDim / kDimPanel;
  static constexpr int kKeyPanel = 128;
  static constexpr int kKeyPanels = Cfg::kBlockN / kKeyPanel;
  // The tensor cores sum the weights of a row too: behind V lie columns of ones. Not where the log-sum-exp is to be
  // exact, which rounded weights would spoil, nor where a product is as wide as it can be.
  static constexpr bool kSumsByProduct = !Cfg::kExactSums && Cfg::kOutColumns != 256;
  static constexpr int kSumColumns = kSumsByProduct ? 8 : 0;
  // Whether a tile of small weights has a base of its own: not where O else stays unmultiplied on most tiles.
  static constexpr bool kTileBase = Cfg::kTwoLevels || Cfg::kValueBlockScales;
  static constexpr int kValueRows = Cfg::kHeadDim + kSumColumns;  // of V^T in shared memory

  static_assert(Cfg::kHeadDim % kDimPanel == 0 && Cfg::kBlockN % kKeyPanel == 0, "whole panels");
  static_assert(Cfg::kHeadDim % Cfg::kOutColumns == 0, "whole parts of O");
  static_assert(Cfg::kOverlap ? Cfg::kOutColumns == Cfg::kHeadDim : Cfg::kTwoLevels,
                "one level of accumulation is overlapped");
  static_assert(!Cfg::kFineScales || (Cfg::kKeyBlockScales && Cfg::kBlockN == kRowBlock),
                "a thread has one group of keys");
  static_assert(!Cfg::kValueBlockScales || (Cfg::kKeyBlockScales && Cfg::kBlockN == kRowBlock),
                "a tile has one unit of V");
  static_assert(!Cfg::kValueBlockScales || !Cfg::kChannelScales, "V has scales of one kind");
  static_assert(Cfg::kPolynomials == 0 || kSumsByProduct, "halves are not summed");
};

// Tiles in shared memory, and the barriers between producer and consumers. Loaders of Q and V may add to it.
template <class Traits>
struct FlashStorage {
  alignas(1024) unsigned char q[Traits::kConsumers][Traits::kDimPanels][Traits::kRows * Traits::kDimPanel];
  alignas(1024) unsigned char k[Traits::kStages][Traits::kDimPanels][Traits::kBlockN * Traits::kDimPanel];
  alignas(1024) unsigned char v[Traits::kStages][Traits::kKeyPanels][Traits::kValueRows * Traits::kKeyPanel];
  ptx::Mbarrier q_full[Traits::kConsumers], q_empty[Traits::kConsumers];
  ptx::Mbarrier k_full[Traits::kStages], k_empty[Traits::kStages], v_full[Traits::kStages], v_empty[Traits::kStages];
  alignas(16) int score_start[4];  // RawScore::kStart; unused without kInt8
};

// A ring of stages: which one is next, and the parity of its current round.
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

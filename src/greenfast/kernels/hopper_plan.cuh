// The Hopper attention kernel's parameters, tiles in shared memory, and division of the work among blocks.
#pragma once

#include <cuda_fp16.h>

#include "output_rows.cuh"
#include "ptx/mbarrier.cuh"
#include "row_block.cuh"

namespace greenfast {

struct FlashParams {
  const float* q_scale;  // (batch x heads), or (batch x heads, blocks of kQueryBlock rows) with kQueryBlockScales
  const float* k_scale;  // (batch x kv_heads), or (batch x kv_heads, blocks of kRowBlock keys) with kKeyBlockScales
  const float* v_scale;  // the same with kValueBlockScales, or (batch x kv_heads, head_dim) with kChannelScales
  void* out;             // (batch, heads, q_len, columns) of Cfg::Out, as `rows` says
  float* lse;            // (batch x heads, q_len), natural logarithm; unused without kLse
  int heads;         // batch x heads
  int heads_per_kv;  // query heads that share a head of K and V
  int q_len;
  int kv_len;
  int causal_shift;   // with a mask, row i attends to keys 0 .. i + causal_shift
  int heads_at_once;  // heads whose K and V the blocks work on at the same time, so that these stay in the L2 cache
  float softmax_scale;
  OutputRows rows;
};

template <class Cfg>
struct FlashShape {
  static constexpr int kHeadDim = Cfg::kHeadDim;
  static constexpr int kBlockN = Cfg::kBlockN;
  static constexpr int kConsumers = Cfg::kConsumers;
  static constexpr int kStages = Cfg::kStages;
  static constexpr int kRows = 64;  // of a warpgroup
  static constexpr int kBlockM = kRows * kConsumers;
  static constexpr int kThreads = 128 * (kConsumers + 1);
  // A row of a tile in shared memory is at most 128 bytes, the widest swizzle; longer ones are cut into panels.
  static constexpr int kDimPanel = kHeadDim < 128 ? kHeadDim : 128;
  static constexpr int kDimPanels = kHeadDim / kDimPanel;
  static constexpr int kKeyPanel = 128;
  static constexpr int kKeyPanels = kBlockN / kKeyPanel;
  static constexpr int kOutColumns = Cfg::kOutColumns;  // of O that one product computes
  // The tensor cores sum the weights of a row too: behind V lie columns of ones. Not where the log-sum-exp is asked
  // for, which rounded weights would spoil, nor where a product is as wide as it can be.
  static constexpr int kSumColumns = Cfg::kLse || kOutColumns == 256 ? 0 : 8;
  static constexpr int kValueRows = kHeadDim + kSumColumns;  // of V^T in shared memory
  static_assert(kHeadDim % kDimPanel == 0 && kBlockN % kKeyPanel == 0 && kHeadDim % kOutColumns == 0, "whole panels");
  static_assert(Cfg::kOverlap ? kOutColumns == kHeadDim : Cfg::kTwoLevels, "one level of accumulation is overlapped");
  static_assert(!Cfg::kValueBlockScales || (Cfg::kKeyBlockScales && kBlockN == kRowBlock), "a tile has one unit of V");
  static_assert(Cfg::kPolynomials == 0 || kSumColumns > 0, "halves are not summed");
};

template <class Cfg>
struct FlashStorage {
  using Shape = FlashShape<Cfg>;
  alignas(1024) unsigned char q[Shape::kConsumers][Shape::kDimPanels][Shape::kRows * Shape::kDimPanel];
  alignas(1024) unsigned char k[Shape::kStages][Shape::kDimPanels][Shape::kBlockN * Shape::kDimPanel];
  alignas(1024) unsigned char v[Shape::kStages][Shape::kKeyPanels][Shape::kValueRows * Shape::kKeyPanel];
  ptx::Mbarrier q_full[Shape::kConsumers], q_empty[Shape::kConsumers];
  ptx::Mbarrier k_full[Shape::kStages], k_empty[Shape::kStages], v_full[Shape::kStages], v_empty[Shape::kStages];
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

// The piece of work that this block does in a round. Every other round goes backwards over the blocks, so that none
// gets the longer pieces each time.
__device__ __forceinline__ int piece_of(int round) {
  return round * gridDim.x + (round % 2 ? gridDim.x - 1 - blockIdx.x : blockIdx.x);
}

// A block's piece of work: kBlockM query rows of a head. Pieces are counted over `heads_at_once` heads at a time; with
// a causal mask the longest come first.
template <class Cfg>
struct Work {
  int head, first_row, tiles;

  __device__ Work(const FlashParams& p, int piece) {
    using Shape = FlashShape<Cfg>;
    const int row_blocks = (p.q_len + Shape::kBlockM - 1) / Shape::kBlockM;
    const int per_group = row_blocks * p.heads_at_once;
    const int group = piece / per_group, in_group = piece % per_group;
    const int width = min(p.heads_at_once, p.heads - group * p.heads_at_once);
    const int block = in_group / width;
    head = group * p.heads_at_once + in_group % width;
    first_row = (Cfg::kCausal ? row_blocks - 1 - block : block) * Shape::kBlockM;
    tiles = tiles_up_to(p, min(first_row + Shape::kBlockM, p.q_len));
  }

  // Key tiles that rows before `end_row` attend to.
  __device__ static int tiles_up_to(const FlashParams& p, int end_row) {
    const int keys = Cfg::kCausal ? min(p.kv_len, end_row + p.causal_shift) : p.kv_len;
    return max(0, (keys + FlashShape<Cfg>::kBlockN - 1) / FlashShape<Cfg>::kBlockN);
  }
};

}  // namespace greenfast

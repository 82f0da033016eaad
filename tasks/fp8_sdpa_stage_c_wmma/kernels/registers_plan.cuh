// Stage 3B: phases, and the division of the work among blocks and threads.
#pragma once

#include "params.cuh"

namespace greenfast {

// Dequantization has no phase of its own: it is part of the products.
struct RegistersPhase {
  enum { kQLoad, kKvPrefetch, kQK, kSoftmax, kPV, kCombine, kStore, kCount };
};

template <class Cfg>
struct RegistersShape {
  static constexpr int kHeadDim = Cfg::kHeadDim;
  static constexpr int kBlockM = 32;
  static constexpr int kRowGroups = kBlockM / 16;
  static constexpr int kKeyGroups = 4;
  static constexpr int kWarps = kRowGroups * kKeyGroups;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kGroupThreads = 32 * kRowGroups;  // threads that share the tiles of a key group
  static constexpr int kKeys = 2048 / kHeadDim;          // keys of a tile
};

// A thread's position: its warp and key group, and in the warp row g and column pair t of the mma fragments.
template <class Cfg>
struct RegistersThread {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int warp = threadIdx.x / 32, group = warp / RegistersShape<Cfg>::kRowGroups;
};

// A work item: kBlockM query rows of a head, with all its keys.
template <class Cfg>
struct RegistersWork {
  using Shape = RegistersShape<Cfg>;
  int head, first_row;
  size_t head_offset;  // offset of the head in q, k and v
  int tiles;
  float scale_log2, v_scale;  // scale_log2: score scale times log2(e)

  __device__ __forceinline__ RegistersWork(const LadderParams& p, int head, int first_row)
      : head(head),
        first_row(first_row),
        head_offset(static_cast<size_t>(head) * p.seq_len * Shape::kHeadDim),
        tiles((p.seq_len + Shape::kKeys - 1) / Shape::kKeys) {}

  // Called long before their use, to hide the latency.
  __device__ __forceinline__ void read_scales(const LadderParams& p) {
    const float log2_e = 1.4426950408889634f;
    scale_log2 = p.q_scale[head] * p.k_scale[head] * p.softmax_scale * log2_e;
    v_scale = p.v_scale[head];
  }
};

}  // namespace greenfast

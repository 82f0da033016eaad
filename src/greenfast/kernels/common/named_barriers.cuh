// The use of a block's 16 named barriers, by kernel. Barrier 0 is that of __syncthreads().
#pragma once

#include "ptx/barrier.cuh"

namespace greenfast {

// Attention on Hopper, with at most four consumer warpgroups.
struct Sm90Barrier {
  enum {
    kBlock,         // __syncthreads()
    kPingPong,      // 4 barriers: ping-pong order of the consumer warpgroups
    kWarpgroup = 8  // 4 barriers: the warps of a consumer warpgroup
  };
};

// Stage 3B of the ladder, and its persistent form.
struct RegistersBarrier {
  enum {
    kBlock,    // __syncthreads()
    kKeyGroup  // 4 barriers: the warps that share a key group's tiles
  };
};

// Stage 3B with a producer warp.
struct SpecializedBarrier {
  enum {
    kConsumers,  // consumer warps
    kBlock       // all warps
  };
};

}  // namespace greenfast

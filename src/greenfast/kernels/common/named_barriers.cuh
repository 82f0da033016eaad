// Which of a block's 16 named barriers is for what, by kernel. Barrier 0 is also the one of __syncthreads().
#pragma once

#include "ptx/barrier.cuh"

namespace greenfast {

// Attention on Hopper, with at most four consumer warpgroups.
struct Sm90Barrier {
  enum {
    kBlock,         // __syncthreads()
    kPingPong,      // and the three after it: the turn of each consumer warpgroup
    kWarpgroup = 8  // and the three after it: the four warps of a consumer warpgroup
  };
};

// Stage 3B of the ladder, and its persistent form.
struct RegistersBarrier {
  enum {
    kBlock,    // __syncthreads()
    kKeyGroup  // and the three after it: the warps that share a key group's tiles
  };
};

// Stage 3B with a warp that copies.
struct SpecializedBarrier {
  enum {
    kConsumers,  // the warps that multiply
    kBlock       // all warps
  };
};

}  // namespace greenfast

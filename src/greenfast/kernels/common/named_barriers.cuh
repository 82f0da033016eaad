// The use of a block's 16 named barriers, by kernel. __syncthreads() uses barrier 0.
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

// The quantizer of Q, K and V, with norm or RoPE and head dim 256.
struct QuantizerBarrier {
  enum {
    kBlock,    // __syncthreads()
    kRows = 1  // 8 barriers: the two warps that share rows
  };
};

}  // namespace greenfast

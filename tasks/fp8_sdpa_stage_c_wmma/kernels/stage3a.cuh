// Stage 3A: P is written into the rows of the score tile that it was computed from, and not into a tile of its own.
// Why: it saves the P tile, 2560 bytes of shared memory.
// Measured: SLOWER, 0.967x at S=512 on an H100 (evidence/h100/fp8_sdpa-e4m3-stage3a): the stage is then misaligned.
#pragma once

#include "scalar.cuh"

namespace greenfast {

// The softmax's __syncwarp keeps a row's lanes from overwriting scores that another lane has not read.
struct PInScoreTile {
  static constexpr int kStride = 2 * TileSizes::kScoreStride;
  static constexpr int kElements = 8;  // of a tile of its own: not used
  static __device__ half* tile(half*, float* scores) { return reinterpret_cast<half*>(scores); }
};

}  // namespace greenfast

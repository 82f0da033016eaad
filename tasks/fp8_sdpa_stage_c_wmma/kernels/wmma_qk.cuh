// QK^T on tensor cores: WMMA 16x16x16 on half operands, accumulated in float32; Q stays in registers as fragments.
// Why: the two products cost the same in scalar.cuh, and one of them all but vanishes.
// Measured: FAST, 1.524x at S=512 on an H100 (evidence/h100/fp8_sdpa-e4m3-wmma_qk).
#pragma once

#include <mma.h>

#include "scalar.cuh"

namespace greenfast {

namespace wmma = nvcuda::wmma;

// Each warp owns one 16-row band; two warps share a band and split its columns.
template <class Shape>
struct WarpTiles {
  static_assert(Shape::kThreads == 128 && Shape::kBlockM == 32 && Shape::kBlockN == 32,
                "four warps cover a 2 x 2 grid of 16x16 score tiles");
  static constexpr int kOutputTiles = Shape::kHeadDim / 32;  // 16x16 tiles of O per warp
  static __device__ __forceinline__ int row() { return threadIdx.x / 64 * 16; }
  static __device__ __forceinline__ int score_col() { return threadIdx.x / 32 % 2 * 16; }
  static __device__ __forceinline__ int output_col(int tile) {
    return (static_cast<int>(threadIdx.x) / 32 % 2 * kOutputTiles + tile) * 16;
  }
};

template <class Shape>
struct WmmaScores {
  static_assert(Shape::KvLayout::kOneStride, "WMMA loads take one stride for all rows");
  using Warp = WarpTiles<Shape>;
  using Accumulator = wmma::fragment<wmma::accumulator, 16, 16, 16, float>;
  static constexpr int kSteps = Shape::kHeadDim / 16;
  wmma::fragment<wmma::matrix_a, 16, 16, 16, half, wmma::row_major> a[kSteps];  // the warp's rows of Q, for all tiles

  __device__ explicit WmmaScores(const half* q) {
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      wmma::load_matrix_sync(a[i], q + Shape::QLayout::offset(Warp::row(), 16 * i), Shape::QLayout::kStride);
    }
  }

  __device__ __forceinline__ void compute(const half* k, float* scores) const {
    wmma::fragment<wmma::matrix_b, 16, 16, 16, half, wmma::col_major> b;
    // Two accumulators over alternate k-steps halve the chain of dependent mma instructions.
    Accumulator even, odd;
    wmma::fill_fragment(even, 0.0f);
    wmma::fill_fragment(odd, 0.0f);
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      wmma::load_matrix_sync(b, k + Shape::KvLayout::offset(Warp::score_col(), 16 * i), Shape::KvLayout::kStride);
      Accumulator& c = i % 2 == 0 ? even : odd;
      wmma::mma_sync(c, a[i], b, c);
    }
#pragma unroll
    for (int i = 0; i < Accumulator::num_elements; ++i) even.x[i] += odd.x[i];
    wmma::store_matrix_sync(scores + Warp::row() * Shape::kScoreStride + Warp::score_col(), even, Shape::kScoreStride,
                            wmma::mem_row_major);
  }
};

}  // namespace greenfast

// Stage 2: P V on tensor cores (WMMA), with P in half from shared memory; O is rescaled in the fragments' registers.
// Why: after Stage 1, P V is the only product left on the FMA pipe, and the largest phase.
// Measured: FAST, 2.730x at S=512 on an H100 (evidence/h100/fp8_sdpa-e4m3-stage2).
#pragma once

#include "wmma_qk.cuh"

namespace greenfast {

template <class Shape>
struct WmmaOutput {
  static_assert(Shape::KvLayout::kOneStride, "WMMA loads take one stride for all rows");
  using Warp = WarpTiles<Shape>;
  using Accumulator = wmma::fragment<wmma::accumulator, 16, 16, 16, float>;
  Accumulator o[Warp::kOutputTiles];
  int element_row[Accumulator::num_elements];

  // The layout of a WMMA accumulator is unspecified. Loading a tile that holds its own row numbers gives each thread
  // the rows of its elements, so O can be rescaled in registers. tile: the score tile, written by prepare. The caller
  // synchronizes after prepare, and before the tile's next use.
  static __device__ void prepare(float* tile) {
    for (int i = threadIdx.x; i < Shape::kBlockM * Shape::kBlockN; i += Shape::kThreads) {
      tile[i / Shape::kBlockN * Shape::kScoreStride + i % Shape::kBlockN] = static_cast<float>(i / Shape::kBlockN);
    }
  }

  __device__ explicit WmmaOutput(const float* tile) {
    Accumulator rows;
    wmma::load_matrix_sync(rows, tile + Warp::row() * Shape::kScoreStride, Shape::kScoreStride, wmma::mem_row_major);
#pragma unroll
    for (int i = 0; i < Accumulator::num_elements; ++i) element_row[i] = static_cast<int>(rows.x[i]);
#pragma unroll
    for (int t = 0; t < Warp::kOutputTiles; ++t) wmma::fill_fragment(o[t], 0.0f);
  }

  __device__ __forceinline__ void rescale(const float* row_scale) {
#pragma unroll
    for (int i = 0; i < Accumulator::num_elements; ++i) {
      const float scale = row_scale[element_row[i]];
#pragma unroll
      for (int t = 0; t < Warp::kOutputTiles; ++t) o[t].x[i] *= scale;
    }
  }

  __device__ __forceinline__ void accumulate(const half* p, const half* v) {
    wmma::fragment<wmma::matrix_a, 16, 16, 16, half, wmma::row_major> a;
    wmma::fragment<wmma::matrix_b, 16, 16, 16, half, wmma::row_major> b;
#pragma unroll
    for (int key = 0; key < Shape::kBlockN; key += 16) {
      wmma::load_matrix_sync(a, p + Warp::row() * Shape::kPStride + key, Shape::kPStride);
#pragma unroll
      for (int t = 0; t < Warp::kOutputTiles; ++t) {
        wmma::load_matrix_sync(b, v + Shape::KvLayout::offset(key, Warp::output_col(t)), Shape::KvLayout::kStride);
        wmma::mma_sync(o[t], a, b, o[t]);
      }
    }
  }

  __device__ __forceinline__ void store(float* tile) const {
#pragma unroll
    for (int t = 0; t < Warp::kOutputTiles; ++t) {
      wmma::store_matrix_sync(tile + Warp::row() * Shape::kHeadDim + Warp::output_col(t), o[t], Shape::kHeadDim,
                              wmma::mem_row_major);
    }
  }
};

}  // namespace greenfast

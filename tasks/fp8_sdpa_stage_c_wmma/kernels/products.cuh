// The two products of attention, S = Q K^T and O += P V, with scalar FMAs, WMMA fragments, or ldmatrix + mma.sync on
// swizzled tiles.
//
// A score policy is constructed from the Q tile and has compute(k, scores), which writes the raw scores of a tile to
// shared memory. An output policy has O in registers and rescale(row_scale), accumulate(p, v) and store(tile);
// prepare(tile) and a barrier must precede its construction. All threads of the block call them; the caller
// synchronizes before and after.
#pragma once

#include <mma.h>

#include "tiles.cuh"
#include "ptx/mma.cuh"

namespace greenfast {

// ---- scalar ---------------------------------------------------------------------------------------------------------

template <class Shape>
struct ScalarScores {
  const half* q;

  __device__ explicit ScalarScores(const half* q) : q(q) {}

  __device__ __forceinline__ void compute(const half* k, float* scores) const {
    const int row = threadIdx.x / Shape::kThreadsPerRow;
    for (int col = threadIdx.x % Shape::kThreadsPerRow; col < Shape::kBlockN; col += Shape::kThreadsPerRow) {
      float sum = 0.0f;
      for (int d = 0; d < Shape::kHeadDim; d += 2) {
        const float2 a = __half22float2(*reinterpret_cast<const half2*>(q + Shape::QLayout::offset(row, d)));
        const float2 b = __half22float2(*reinterpret_cast<const half2*>(k + Shape::KvLayout::offset(col, d)));
        sum = fmaf(a.x, b.x, sum);
        sum = fmaf(a.y, b.y, sum);
      }
      scores[row * Shape::kScoreStride + col] = sum;
    }
  }
};

// Each thread has kHeadDim / kThreadsPerRow adjacent columns of one row of O.
template <class Shape>
struct ScalarOutput {
  static constexpr int kCols = Shape::kHeadDim / Shape::kThreadsPerRow;
  float o[kCols] = {};

  static __device__ __forceinline__ int row() { return threadIdx.x / Shape::kThreadsPerRow; }
  static __device__ __forceinline__ int col() { return threadIdx.x % Shape::kThreadsPerRow * kCols; }

  static __device__ void prepare(float*) {}
  __device__ explicit ScalarOutput(const float*) {}

  __device__ __forceinline__ void rescale(const float* row_scale) {
#pragma unroll
    for (int c = 0; c < kCols; ++c) o[c] *= row_scale[row()];
  }

  __device__ __forceinline__ void accumulate(const half* p, const half* v) {
    for (int key = 0; key < Shape::kBlockN; ++key) {
      const float weight = __half2float(p[row() * Shape::kPStride + key]);
#pragma unroll
      for (int c = 0; c < kCols; c += 2) {
        const float2 b = __half22float2(*reinterpret_cast<const half2*>(v + Shape::KvLayout::offset(key, col() + c)));
        o[c] = fmaf(weight, b.x, o[c]);
        o[c + 1] = fmaf(weight, b.y, o[c + 1]);
      }
    }
  }

  __device__ __forceinline__ void store(float* tile) const {
#pragma unroll
    for (int c = 0; c < kCols; ++c) tile[row() * Shape::kHeadDim + col() + c] = o[c];
  }
};

// ---- tensor cores: each warp owns one 16-row band; two warps share a band and split its columns ---------------------

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

namespace wmma = nvcuda::wmma;

template <class Shape>
struct WmmaScores {
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

template <class Shape>
struct WmmaOutput {
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

// ---- tensor cores on swizzled tiles: WMMA's loads take one stride for all rows, so ldmatrix addresses the rows ------

// Lane-dependent row and column offsets of the four 8x8 tiles that ldmatrix.x4 gathers for a 16x16 operand.
struct LdmatrixLane {
  // A (rows x k), and B stored as k x columns (read with .trans): tiles go down the rows first.
  static __device__ __forceinline__ int row_major_row() { return threadIdx.x % 16; }
  static __device__ __forceinline__ int row_major_col() { return threadIdx.x % 32 / 16 * 8; }
  // B stored as columns x k: tiles go along k first.
  static __device__ __forceinline__ int col_major_row() { return threadIdx.x % 32 / 16 * 8 + threadIdx.x % 8; }
  static __device__ __forceinline__ int col_major_col() { return threadIdx.x % 16 / 8 * 8; }
};

template <class Shape>
struct MmaScores {
  using Warp = WarpTiles<Shape>;
  using Lane = LdmatrixLane;
  static constexpr int kSteps = Shape::kHeadDim / 16;
  unsigned a[kSteps][4];

  __device__ explicit MmaScores(const half* q) {
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      ptx::ldmatrix_x4(a[i],
                       q + Shape::QLayout::offset(Warp::row() + Lane::row_major_row(), 16 * i + Lane::row_major_col()));
    }
  }

  __device__ __forceinline__ void compute(const half* k, float* scores) const {
    float sums[2][2][4] = {};  // over alternate k-steps, as in WmmaScores
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      unsigned b[4];
      ptx::ldmatrix_x4(
          b, k + Shape::KvLayout::offset(Warp::score_col() + Lane::col_major_row(), 16 * i + Lane::col_major_col()));
      ptx::mma_m16n8k16(sums[i % 2][0], a[i], b[0], b[1]);
      ptx::mma_m16n8k16(sums[i % 2][1], a[i], b[2], b[3]);
    }
    const int row = Warp::row() + threadIdx.x % 32 / 4;
    const int col = Warp::score_col() + threadIdx.x % 4 * 2;
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      float* out = scores + row * Shape::kScoreStride + col + 8 * n;
      float c[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) c[i] = sums[0][n][i] + sums[1][n][i];
      *reinterpret_cast<float2*>(out) = make_float2(c[0], c[1]);
      *reinterpret_cast<float2*>(out + 8 * Shape::kScoreStride) = make_float2(c[2], c[3]);
    }
  }
};

template <class Shape>
struct MmaOutput {
  using Warp = WarpTiles<Shape>;
  using Lane = LdmatrixLane;
  float o[Warp::kOutputTiles][2][4] = {};

  static __device__ void prepare(float*) {}
  __device__ explicit MmaOutput(const float*) {}

  static __device__ __forceinline__ int row() { return Warp::row() + threadIdx.x % 32 / 4; }

  __device__ __forceinline__ void rescale(const float* row_scale) {
    const float upper = row_scale[row()];
    const float lower = row_scale[row() + 8];
#pragma unroll
    for (int t = 0; t < Warp::kOutputTiles; ++t) {
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        o[t][n][0] *= upper;
        o[t][n][1] *= upper;
        o[t][n][2] *= lower;
        o[t][n][3] *= lower;
      }
    }
  }

  __device__ __forceinline__ void accumulate(const half* p, const half* v) {
#pragma unroll
    for (int key = 0; key < Shape::kBlockN; key += 16) {
      unsigned a[4];
      ptx::ldmatrix_x4(a, p + (Warp::row() + Lane::row_major_row()) * Shape::kPStride + key + Lane::row_major_col());
#pragma unroll
      for (int t = 0; t < Warp::kOutputTiles; ++t) {
        unsigned b[4];
        ptx::ldmatrix_x4_trans(
            b, v + Shape::KvLayout::offset(key + Lane::row_major_row(), Warp::output_col(t) + Lane::row_major_col()));
        ptx::mma_m16n8k16(o[t][0], a, b[0], b[1]);
        ptx::mma_m16n8k16(o[t][1], a, b[2], b[3]);
      }
    }
  }

  __device__ __forceinline__ void store(float* tile) const {
#pragma unroll
    for (int t = 0; t < Warp::kOutputTiles; ++t) {
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        float* out = tile + row() * Shape::kHeadDim + Warp::output_col(t) + 8 * n + threadIdx.x % 4 * 2;
        *reinterpret_cast<float2*>(out) = make_float2(o[t][n][0], o[t][n][1]);
        *reinterpret_cast<float2*>(out + 8 * Shape::kHeadDim) = make_float2(o[t][n][2], o[t][n][3]);
      }
    }
  }
};

}  // namespace greenfast

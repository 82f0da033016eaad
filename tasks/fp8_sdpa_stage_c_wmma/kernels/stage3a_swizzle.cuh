// Stage 3A with XOR swizzle: rows of K and V are not padded; their 16-byte chunks are permuted by the row.
// Why: bank conflicts. WMMA takes one stride for all rows, so ldmatrix and mma.sync read the tiles.
// Measured: SHORT, 1.017x over Stage 3A at S=512 on an H100 (evidence/h100/fp8_sdpa-e4m3-stage3a_swizzle).
#pragma once

#include "ptx/mma.cuh"
#include "wmma_qk.cuh"

namespace greenfast {

// Rows of kCols halves with 16-byte chunks permuted by row (USE_XOR_SWIZZLE): no bank conflicts and no padding, but
// only for loads that address each row separately (ldmatrix, not WMMA).
template <int kCols>
struct XorSwizzledLayout {
  static_assert(kCols % 64 == 0, "the swizzle permutes eight 16-byte chunks");
  static constexpr bool kOneStride = false;
  static constexpr int kStride = kCols;
  static __device__ __forceinline__ int offset(int row, int col) {
    return row * kStride + ((((col >> 3) ^ (row & 7)) << 3) | (col & 7));
  }
};

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

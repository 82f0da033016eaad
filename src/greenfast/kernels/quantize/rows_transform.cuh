// Rows of Q or K in registers: loaded, multiplied by random-like signs and a Hadamard matrix (by mma), and cast.
//
// A warp takes kQueryBlock rows, or kSplit adjacent warps share them and split the columns. Of rows t / 4 and t / 4 + 8
// (t: its lane) a thread loads columns 32 i + 8 (t % 4) .. + 7 for all i. In bits, a column is (i, quad lane, half b of
// eight, element e of four), and the Hadamard matrix in Sylvester's order is a product over bits. Its 16 x 16 factor
// over (quad lane, e) is an mma, exact on 16-bit inputs, with operands and results ordered so that each thread receives
// the columns that it loaded. The factor over b and the lowest bit of i is a butterfly on a thread's own values. The
// factor over the other bits of i is a sum of mma results with signs.
//
// Before that, half of the columns change sign: otherwise equal columns would be concentrated in one. Negative are the
// columns with bits c0, c1, .. for which c0 c1 + c2 c5 + c3 c4 + c6 c7 is odd. This is a bent function (Rothaus, 1976)
// of 6 or 8 bits with a flat Walsh spectrum: equal columns, or any other row of the Hadamard matrix, give results of
// equal magnitude (with 7 bits half of them, and the others are 0). The signs are part of the mma operand, at no cost.
#pragma once

#include "ptx/mma_input.cuh"
#include "quantize/common.cuh"

namespace greenfast {

// Cfg: kHeadDim; kColumns, of the input; kRotate; kInt8, whether codes are int8, or E4M3; In, the input's type.
template <class Cfg, int kWarpsOfRows = Cfg::kHeadDim <= 128 ? 1 : 2>
struct RowsTransform {
  static constexpr int kParts = Cfg::kHeadDim / 64;  // parts of 64 columns
  static constexpr int kSplit = kWarpsOfRows;
  static constexpr int kWarpParts = kParts / kSplit;
  static constexpr int kGroups = 4;  // groups of four columns in a part
  static constexpr float kCodeMax = Cfg::kInt8 ? 127.0f : 448.0f;
  using Mma = ptx::InputMma<typename Cfg::In>;
  using Loaded = Pack<typename Cfg::In, kVector>;
  using Values = float[kWarpParts][2][kGroups][4];  // part, row, group, element
  using Codes = uint2;                              // eight columns

  const int first_part;  // this warp's first part
  // mma operand of the 16 x 16 matrix: a column's signs for two adjacent rows, times 1 / (2 kHeadDim) so that no sum
  // overflows. Result e and row e' add the sign of (e & e'), the same for all threads.
  unsigned signs;
  unsigned other_signs;  // signs, times the sign for first_part > 0

  __device__ __forceinline__ RowsTransform()
      : first_part(kSplit == 1 ? 0 : __shfl_sync(0xffffffffu, threadIdx.x / 32 % kSplit * kWarpParts, 0)) {
    const int column = threadIdx.x % 32 / 4, quad = threadIdx.x % 4;
    const unsigned low = __popc(column / 2 & quad) & 1 ^ (quad == 3), high = low ^ column & 1;
    constexpr unsigned kExponent = Cfg::kHeadDim == 64 ? 7 : Cfg::kHeadDim == 128 ? 8 : 9;
    signs = Mma::inverse_power(kExponent) | low << 15 | high << 31;
    other_signs = first_part > 0 ? signs ^ 0x80008000u : signs;
  }

  __device__ __forceinline__ static int row_of_warp() { return threadIdx.x % 32 / 4; }
  __device__ __forceinline__ int column_of(int part, int group) const {
    return (first_part + part) * 64 + group / 2 * 32 + threadIdx.x % 4 * 8 + group % 2 * 4;
  }

  // Loads and transforms the warp's parts: with kRotate times signs and the Hadamard matrix, divided by kFactor.
  // load(r, column): eight columns of row r of the thread's two.
  template <class Load>
  __device__ __forceinline__ void transform(Load load, Values& x) const {
    if constexpr (!Cfg::kRotate) {
#pragma unroll
      for (int i = 0; i < kWarpParts * 4; ++i) {
        const int part = i / 4, r = i / 2 % 2, group = i % 2 * 2;
        const Loaded eight = load(r, column_of(part, group));
#pragma unroll
        for (int c = 0; c < kVector; ++c) x[part][r][group + c / 4][c % 4] = 0.5f * static_cast<float>(eight.values[c]);
      }
      return;
    }
#pragma unroll
    for (int i = 0; i < 2 * kParts; ++i) {
      const Loaded rows[2] = {load(0, i * 32 + threadIdx.x % 4 * 8), load(1, i * 32 + threadIdx.x % 4 * 8)};
      const unsigned (&low)[4] = reinterpret_cast<const unsigned (&)[4]>(rows[0]);
      const unsigned (&high)[4] = reinterpret_cast<const unsigned (&)[4]>(rows[1]);
#pragma unroll
      for (int part = 0; part < kWarpParts; ++part) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {  // of the eight columns
          const bool negative = (__popc(part & i / 2) ^ half & i ^ (i / 2 == 3)) & 1;
          const unsigned part_signs = kSplit > 1 && i / 2 & kWarpParts ? other_signs : signs;
          const unsigned flip = negative ? 0x80008000u : 0u;
          const unsigned a[4] = {low[2 * half], high[2 * half], low[2 * half + 1], high[2 * half + 1]};
          float (&to)[2][kGroups][4] = x[part];
          const int m = i % 2 * 2 + half;
#pragma unroll
          for (int side = 0; side < 2; ++side) {
            float c[4] = {to[0][m][2 * side], to[0][m][2 * side + 1], to[1][m][2 * side], to[1][m][2 * side + 1]};
            const unsigned b[2] = {part_signs ^ flip, part_signs ^ flip ^ (side == 0 ? 0x80000000u : 0x00008000u)};
            i < 2 ? Mma::set(c, a, b) : Mma::add(c, a, b);
#pragma unroll
            for (int e = 0; e < 4; ++e) to[e / 2][m][2 * side + e % 2] = c[e];
          }
        }
      }
    }
#pragma unroll
    for (int distance = 1; distance < kGroups; distance *= 2) {
#pragma unroll
      for (int i = 0; i < kWarpParts * 2 * kGroups * 4; ++i) {
        const int part = i / 32, r = i / 16 % 2, m = i / 4 % 4, e = i % 4;
        if (m & distance) continue;
        const float a = x[part][r][m][e], b = x[part][r][m + distance][e];
        x[part][r][m][e] = a + b;
        x[part][r][m + distance][e] = a - b;
      }
    }
  }

  // Zeroes the thread's rows from `length` on.
  __device__ __forceinline__ static void zero_rows_from(Values& x, const int (&row)[2], int length) {
    if (!__any_sync(0xffffffffu, row[1] >= length)) return;
#pragma unroll
    for (int i = 0; i < kWarpParts * 2 * kGroups * 4; ++i) {
      if (row[i / 16 % 2] >= length) x[i / 32][i / 16 % 2][i / 4 % 4][i % 4] = 0.0f;
    }
  }

  // The factor that transform leaves out, to avoid overflow in its sums and in the subtraction of the mean.
  static constexpr float kRoot = Cfg::kHeadDim == 64 ? 8.0f : Cfg::kHeadDim == 128 ? 11.313708499f : 16.0f;
  static constexpr float kFactor = Cfg::kRotate ? 2.0f * kRoot : 2.0f;

  // The largest magnitude of a thread's values; NaN if one is NaN.
  __device__ __forceinline__ static float largest(const Values& x) {
    float some[4] = {};  // four chains, for instruction-level parallelism
#pragma unroll
    for (int i = 0; i < kWarpParts * 2 * kGroups * 4; ++i) {
      some[i % 4] = ptx::max_nan(some[i % 4], fabsf(x[i / 32][i / 16 % 2][i / 4 % 4][i % 4]));
    }
    return ptx::max_nan(ptx::max_nan(some[0], some[1]), ptx::max_nan(some[2], some[3]));
  }

  // The same for row r of its two.
  __device__ __forceinline__ static float largest(const Values& x, int r) {
    float some[2] = {};
#pragma unroll
    for (int i = 0; i < kWarpParts * kGroups * 4; ++i) {
      some[i % 2] = ptx::max_nan(some[i % 2], fabsf(x[i / 16][r][i / 4 % 4][i % 4]));
    }
    return ptx::max_nan(some[0], some[1]);
  }

  // The scale for a largest magnitude amax of transformed values, kFactor included.
  __device__ __forceinline__ static float scale_for(float amax) { return scale_of(amax, kCodeMax, kFactor); }

  // Casts the values and calls store(r, column, codes) for each eight columns. true_scales: of the thread's two rows.
  template <class Store>
  __device__ __forceinline__ void cast(const Values& x, const float (&true_scales)[2], Store store) const {
    const float scales[2] = {true_scales[0] * (1.0f / kFactor), true_scales[1] * (1.0f / kFactor)};
    const float inverses[2] = {__frcp_rn(scales[0]), __frcp_rn(scales[1])};
#pragma unroll
    for (int i = 0; i < kWarpParts * 4; ++i) {
      const int part = i / 4, r = i / 2 % 2, group = i % 2 * 2;
      const float scale = scales[r], inverse = inverses[r];
      const unsigned finite_mask = scale == scale ? ~0u : 0u;
      unsigned out[2];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float four[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const float value = x[part][r][group + h][e];
          // Rotated values have rounding errors of their own: a product is as accurate as a quotient.
          four[e] = Cfg::kRotate ? value * inverse : divide(value, scale, inverse);
        }
        out[h] = encode_four<Cfg::kInt8 ? Format::kInt8 : Format::kE4M3>(four) & finite_mask;
      }
      store(r, column_of(part, group), make_uint2(out[0], out[1]));
    }
  }
};

}  // namespace greenfast

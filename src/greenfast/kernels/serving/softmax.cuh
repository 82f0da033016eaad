// Scores to weights, in E4M3, with each row's maximum and sum: the online softmax of a chunk.
#pragma once

#include <math_constants.h>

#include "ptx/e4m3.cuh"
#include "ptx/math.cuh"
#include "ptx/mbarrier.cuh"
#include "serving/traits.cuh"

namespace greenfast::serving {

// A number in shared memory, read behind all that the program has done by then: what depends on it is not moved ahead.
__device__ __forceinline__ float load_behind(const float* from) {
  float x;
  asm volatile("ld.volatile.shared.f32 %0, [%1];" : "=f"(x) : "r"(ptx::shared_address(from)) : "memory");
  return x;
}

// Two neighbours in shared memory. The compiler must not load a whole tile's ahead: registers are short.
__device__ __forceinline__ void load_pair(const float* from, float (&x)[2]) {
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x[0]), "=f"(x[1]) : "r"(ptx::shared_address(from)));
}

// The first of the thread's two rows, of the row part's 64; the other one is 8 further on.
__device__ __forceinline__ int own_row() { return threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4; }

// Of a consumer warpgroup. A thread holds, of rows t / 4 and t / 4 + 8 of its warp's 16 (t: its lane), columns
// 8 j + 2 (t % 4) and the next one, for all j. Register i of scores belongs to row i / 2 % 2 of the two.
template <class T>
struct Softmax {
  static constexpr int kScores = kTile / 2, kSteps = kTile / 32;

  float max[2], sum[2];  // of the present chunk; sum is of this thread's columns

  __device__ __forceinline__ void start() {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      max[r] = -CUDART_INF_F;
      sum[r] = 0.0f;
    }
  }

  // Keeps the maxima and sums of a chunk in shared memory. All lanes of a quad have the same.
  __device__ __forceinline__ void keep(Sums& sums) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float total = sum[r] + __shfl_xor_sync(0xffffffffu, sum[r], 1);
      total += __shfl_xor_sync(0xffffffffu, total, 2);
      sums.max[own_row() + 8 * r] = max[r];
      sums.sum[own_row() + 8 * r] = total;
    }
  }

  // The largest scores of a thread's two rows, if above the chunk's so far. As integers, three at a time and starting
  // from 0, positive floats compare as they should. Where 0 comes out and the row had nothing above 0 before, all are
  // negative: of these the largest has the smallest bits. Two chains for each row: one would wait for itself.
  template <int kCount>
  __device__ __forceinline__ void find_maxima(const float (&s)[kCount], float (&top)[2]) const {
    int tops[2][2] = {};
#pragma unroll
    for (int i = 0; i < kCount; i += 2) {
      int& x = tops[i / 2 % 2][i / 4 % 2];
      x = __vimax3_s32(x, __float_as_int(s[i]), __float_as_int(s[i + 1]));
    }
    const int whole[2] = {::max(tops[0][0], tops[0][1]), ::max(tops[1][0], tops[1][1])};
    top[0] = __int_as_float(whole[0]);
    top[1] = __int_as_float(whole[1]);
    const int negative = ((whole[0] == 0) & (max[0] < 0.0f)) | ((whole[1] == 0) & (max[1] < 0.0f));  // no branch
    if (__any_sync(0xffffffffu, negative)) {
      unsigned least[2] = {0xff800000u, 0xff800000u};  // of -inf
#pragma unroll
      for (int i = 0; i < kCount; i += 2) {
        unsigned& x = least[i / 2 % 2];
        x = __vimin3_u32(x, __float_as_uint(s[i]), __float_as_uint(s[i + 1]));
      }
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        if (whole[r] == 0) top[r] = __uint_as_float(least[r]);
      }
    }
  }

  // Turns raw scores into weights, and the chunk's maxima and sums into those with this tile; gives the factors for
  // what came before. first_key: of the tile. between: is called once a thread has found
  // its own maxima; it may read `factor` again. masked: whether this tile has a mask, which kMasked says of any.
  template <bool kMasked, int kCount, class Between>
  __device__ __forceinline__ void weigh(float (&s)[kCount], const AttentionParams& p, const Rows& rows,
                                        const KeyFactors* keys, int first_key, float (&rescale)[2],
                                        const Between& between, bool masked = true) {
    const int column = threadIdx.x % 4 * 2;
    float factor[2] = {rows.factor[own_row()], rows.factor[own_row() + 8]};
    float top[2], bias[2];
    if constexpr (T::kExponents) {
#pragma unroll
      for (int i = 0; i < kCount; i += 4) {  // two keys, of both rows
        const int key = i / 4 * 8 + column;
        float scales[2] = {1.0f, 1.0f}, log2_values[2] = {0.0f, 0.0f};
        if constexpr (T::kTokenScales) {
          load_pair(&keys->scale[key], scales);
          load_pair(&keys->log2_value[key], log2_values);
        }
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float x = s[i + j] * scales[j % 2];
          s[i + j] = T::kSoftcap ? fmaf(ptx::tanh(x * factor[j / 2]), p.softcap * kLog2E, log2_values[j % 2])
                                 : fmaf(x, factor[j / 2], log2_values[j % 2]);
        }
      }
    }
    if (kMasked && masked) {
      const int before = first_key + column;
      const int begin[2] = {rows.begin[own_row()] - before, rows.begin[own_row() + 8] - before};
      const int end[2] = {rows.end[own_row()] - before, rows.end[own_row() + 8] - before};
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        const int key = i / 4 * 8 + i % 2;
        s[i] = key >= begin[i / 2 % 2] && key < end[i / 2 % 2] ? s[i] : -CUDART_INF_F;
      }
    }
    find_maxima(s, top);
    between(factor);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if constexpr (!T::kExponents) top[r] *= factor[r];
    }
#pragma unroll
    for (int step = 1; step < 4; step *= 2) {
      const float other[2] = {__shfl_xor_sync(0xffffffffu, top[0], step), __shfl_xor_sync(0xffffffffu, top[1], step)};
      top[0] = fmaxf(top[0], other[0]);
      top[1] = fmaxf(top[1], other[1]);
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      top[r] = top[r] > max[r] + kSlack ? top[r] : max[r];
      const float base = top[r] == -CUDART_INF_F ? 0.0f : top[r];
      rescale[r] = ptx::ex2(max[r] - base);
      bias[r] = kOffset - base;
      max[r] = top[r];
    }
    float sums[2][4] = {{sum[0] * rescale[0], 0.0f, 0.0f, 0.0f}, {sum[1] * rescale[1], 0.0f, 0.0f, 0.0f}};
#pragma unroll
    for (int i = 0; i < kCount; i += 4) {
      float inverse_values[2];
      if constexpr (T::kTokenScales) load_pair(&keys->inverse_value[i / 4 * 8 + column], inverse_values);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int r = j / 2;
        float &x = sums[r][i / 4 % 4], &w = s[i + j];
        w = ptx::ex2(T::kExponents ? w + bias[r] : fmaf(w, factor[r], bias[r]));
        x = T::kTokenScales ? fmaf(w, inverse_values[j % 2], x) : x + w;
      }
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) sum[r] = (sums[r][0] + sums[r][1]) + (sums[r][2] + sums[r][3]);
  }

  template <int kCount>
  __device__ __forceinline__ static void pack(const float (&w)[kCount], unsigned (&weights)[kCount / 16][4]) {
#pragma unroll
    for (int t = 0; t < kCount / 16; ++t) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {  // row i % 2, columns 16 (i / 2) on
        const int first = 16 * t + 8 * (i / 2) + 2 * (i % 2);
        const float four[4] = {w[first], w[first + 1], w[first + 4], w[first + 5]};
        weights[t][i] = ptx::pack_e4m3(four);
      }
    }
  }
};

}  // namespace greenfast::serving

// Online softmax of a chunk: scores to P in E4M3, with each row's maximum and sum.
#pragma once

#include <math_constants.h>

#include "ptx/e4m3.cuh"
#include "ptx/math.cuh"
#include "ptx/mbarrier.cuh"
#include "serving/traits.cuh"

namespace greenfast::serving {

// Loads from shared memory after all earlier memory operations; the compiler cannot move it ahead.
__device__ __forceinline__ float load_ordered(const float* from) {
  float x;
  asm volatile("ld.volatile.shared.f32 %0, [%1];" : "=f"(x) : "r"(ptx::shared_address(from)) : "memory");
  return x;
}

// Loads two adjacent floats. volatile asm keeps the compiler from hoisting a whole tile's loads, for which there are no
// registers.
__device__ __forceinline__ void load_pair(const float* from, float (&x)[2]) {
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x[0]), "=f"(x[1]) : "r"(ptx::shared_address(from)));
}

// The first of the thread's two rows, out of the warpgroup's 64. The other one is 8 rows below.
__device__ __forceinline__ int thread_row() { return threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4; }

// Softmax of a consumer warpgroup. A thread holds, of rows t / 4 and t / 4 + 8 of its warp's 16 (t: its lane), columns
// 8 j + 2 (t % 4) and the next one, for all j. Register i of the scores belongs to row i / 2 % 2 of the two.
template <class T>
struct Softmax {
  static constexpr int kScores = kBlockN / 2, kSteps = kBlockN / 32;

  float max[2], sum[2];  // of the current chunk; sum: over this thread's columns

  __device__ __forceinline__ void start() {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      max[r] = -CUDART_INF_F;
      sum[r] = 0.0f;
    }
  }

  // Stores the chunk's row maxima and sums in shared memory: after this warp has read the last chunk's, and before it
  // reads the new ones. All lanes of a quad store the same values.
  __device__ __forceinline__ void keep(RowStats& stats) const {
    __syncwarp();
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float total = sum[r] + __shfl_xor_sync(0xffffffffu, sum[r], 1);
      total += __shfl_xor_sync(0xffffffffu, total, 2);
      stats.max[thread_row() + 8 * r] = max[r];
      stats.sum[thread_row() + 8 * r] = total;
    }
    __syncwarp();
  }

  // Maxima of a thread's two rows, if above the chunk's maxima so far. Uses integer max on the float bits, three
  // operands at a time and starting from 0. This is right for positive floats. If the result is 0 and the row maximum so
  // far is negative, all scores are negative: then the largest has the smallest bits. Two chains per row, for
  // instruction-level parallelism.
  template <int kCount>
  __device__ __forceinline__ void thread_max(const float (&s)[kCount], float (&row_max)[2]) const {
    int chain_max[2][2] = {};
#pragma unroll
    for (int i = 0; i < kCount; i += 2) {
      int& x = chain_max[i / 2 % 2][i / 4 % 2];
      x = __vimax3_s32(x, __float_as_int(s[i]), __float_as_int(s[i + 1]));
    }
    const int max_bits[2] = {::max(chain_max[0][0], chain_max[0][1]), ::max(chain_max[1][0], chain_max[1][1])};
    row_max[0] = __int_as_float(max_bits[0]);
    row_max[1] = __int_as_float(max_bits[1]);
    const int negative =
        ((max_bits[0] == 0) & (max[0] < 0.0f)) | ((max_bits[1] == 0) & (max[1] < 0.0f));  // branch-free
    if (__any_sync(0xffffffffu, negative)) {
      unsigned min_bits[2] = {0xff800000u, 0xff800000u};  // bits of -inf
#pragma unroll
      for (int i = 0; i < kCount; i += 2) {
        unsigned& x = min_bits[i / 2 % 2];
        x = __vimin3_u32(x, __float_as_uint(s[i]), __float_as_uint(s[i + 1]));
      }
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        if (max_bits[r] == 0) row_max[r] = __uint_as_float(min_bits[r]);
      }
    }
  }

  // Replaces raw scores by P, updates the chunk's row maxima and sums, and returns in `rescale` the factors for earlier
  // tiles. first_key: of the tile. after_max: called after the thread has its maxima; it may reload `factor`. masked:
  // whether this tile has a mask; kMasked: whether any tile of this code has one.
  template <bool kMasked, int kCount, class AfterMax>
  __device__ __forceinline__ void online_softmax(float (&s)[kCount], const AttentionParams& p, const Rows& rows,
                                                 const KeyScales* keys, int first_key, float (&rescale)[2],
                                                 const AfterMax& after_max, bool masked = true) {
    const int column = threadIdx.x % 4 * 2;
    float factor[2] = {rows.scale_log2[thread_row()], rows.scale_log2[thread_row() + 8]};
    float row_max[2], bias[2];
    if constexpr (T::kScaledScores) {
#pragma unroll
      for (int i = 0; i < kCount; i += 4) {  // two keys of both rows
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
      const int begin[2] = {rows.begin[thread_row()] - before, rows.begin[thread_row() + 8] - before};
      const int end[2] = {rows.end[thread_row()] - before, rows.end[thread_row() + 8] - before};
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        const int key = i / 4 * 8 + i % 2;
        s[i] = key >= begin[i / 2 % 2] && key < end[i / 2 % 2] ? s[i] : -CUDART_INF_F;
      }
    }
    thread_max(s, row_max);
    after_max(factor);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if constexpr (!T::kScaledScores) row_max[r] *= factor[r];
    }
#pragma unroll
    for (int step = 1; step < 4; step *= 2) {
      const float other[2] = {__shfl_xor_sync(0xffffffffu, row_max[0], step),
                              __shfl_xor_sync(0xffffffffu, row_max[1], step)};
      row_max[0] = fmaxf(row_max[0], other[0]);
      row_max[1] = fmaxf(row_max[1], other[1]);
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      row_max[r] = row_max[r] > max[r] + kRescaleThreshold ? row_max[r] : max[r];
      const float base = row_max[r] == -CUDART_INF_F ? 0.0f : row_max[r];
      rescale[r] = ptx::ex2(max[r] - base);
      bias[r] = kMaxOffset - base;
      max[r] = row_max[r];
    }
    float stats[2][4] = {{sum[0] * rescale[0], 0.0f, 0.0f, 0.0f}, {sum[1] * rescale[1], 0.0f, 0.0f, 0.0f}};
#pragma unroll
    for (int i = 0; i < kCount; i += 4) {
      float inverse_values[2];
      if constexpr (T::kTokenScales) load_pair(&keys->inverse_value[i / 4 * 8 + column], inverse_values);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int r = j / 2;
        float &x = stats[r][i / 4 % 4], &w = s[i + j];
        w = ptx::ex2(T::kScaledScores ? w + bias[r] : fmaf(w, factor[r], bias[r]));
        x = T::kTokenScales ? fmaf(w, inverse_values[j % 2], x) : x + w;
      }
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) sum[r] = (stats[r][0] + stats[r][1]) + (stats[r][2] + stats[r][3]);
  }

  template <int kCount>
  __device__ __forceinline__ static void pack(const float (&w)[kCount], unsigned (&p_frag)[kCount / 16][4]) {
#pragma unroll
    for (int t = 0; t < kCount / 16; ++t) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {  // row i % 2, columns from 16 (i / 2)
        const int first = 16 * t + 8 * (i / 2) + 2 * (i % 2);
        const float four[4] = {w[first], w[first + 1], w[first + 4], w[first + 5]};
        p_frag[t][i] = ptx::pack_e4m3(four);
      }
    }
  }
};

}  // namespace greenfast::serving

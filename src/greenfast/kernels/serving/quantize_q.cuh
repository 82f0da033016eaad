// Fused quantization of Q to E4M3, with a scale per row, by the consumers.
#pragma once

#include "ptx/cp_async.cuh"
#include "ptx/e4m3.cuh"
#include "ptx/math.cuh"
#include "serving/traits.cuh"

namespace greenfast::serving {

// The index of a thread among the threads that share its rows.
template <class T>
__device__ __forceinline__ int row_thread() {
  return threadIdx.x % T::kRowThreads;
}

// Reduces x[i], the lane's maximum of row i, over lanes so that lane r gets the maximum of row r. In each step one lane
// of a pair continues with the first half of the rows, the other with the second. That lane also does the row's
// divisions.
template <int kRows, int kCount>
__device__ __forceinline__ void reduce_row_maxima(unsigned (&x)[kCount], int lane) {
  if constexpr (kRows > 1) {
    constexpr int kHalf = kRows / 2;
    const bool second = lane & kHalf;
#pragma unroll
    for (int i = 0; i < kHalf; ++i) {
      const unsigned keep = second ? x[i + kHalf] : x[i], send = second ? x[i] : x[i + kHalf];
      x[i] = ptx::max_u16x2(keep, __shfl_xor_sync(0xffffffffu, send, kHalf));
    }
    reduce_row_maxima<kHalf>(x, lane);
  }
}

// The parts of Q in global memory that a thread quantizes: 8 columns of one row in each pass. Rows after the last one
// are copies of it.
template <class T>
struct QRows {
  static constexpr int kLanes = T::kHeadDim / 8,
                       kRowsPerPass = T::kRowThreads / kLanes;  // threads per row; rows per pass
  static constexpr int kPasses = (T::kWarpgroupRows + kRowsPerPass - 1) / kRowsPerPass;
  static constexpr int kBytes = T::kQRowBytes / T::kHeadDim;
  // Strides are in units of 8 bytes, a divisor of all strides: 32-bit products suffice. 64-bit products would be most of
  // the instructions here.
  const uint2* tile_q;
  int token_step, head_step, group, first, stop;
  unsigned group_inverse;

  __device__ __forceinline__ QRows(const AttentionParams& p, const Work& work, int warpgroup_m)
      : tile_q(reinterpret_cast<const uint2*>(
            static_cast<const unsigned char*>(p.q) +
            (work.tile.q_begin * p.q_token + work.head * p.batch.group * p.q_head + column()) * kBytes)),
        token_step(static_cast<int>(p.q_token * kBytes / 8)),
        head_step(p.batch.group == 1 ? token_step : static_cast<int>(p.q_head * kBytes / 8)),
        group(p.batch.group),
        first(work.tile.first_row + warpgroup_m * 64),
        stop(work.tile.q_len * p.batch.group),
        group_inverse(p.batch.group_inverse) {}
  __device__ __forceinline__ static int lane() { return row_thread<T>() % kLanes; }
  __device__ __forceinline__ static int column() { return lane() * 8; }
  __device__ __forceinline__ static int part_row(int pass) { return row_thread<T>() / kLanes + pass * kRowsPerPass; }
  __device__ __forceinline__ int row(int pass) const {
    return min(first + (kPasses * kRowsPerPass > T::kWarpgroupRows ? min(part_row(pass), T::kWarpgroupRows - 1)
                                                                   : part_row(pass)),
               stop - 1);
  }
  // If group is 1, rows are tokens, and group_inverse is 0.
  __device__ __forceinline__ const void* at(int pass) const {
    const int token = static_cast<int>(__umulhi(row(pass), group_inverse)), head = row(pass) - token * group;
    return tile_q + ptx::mad_wide(token, token_step, ptx::mad_wide(head, head_step, 0));
  }
};

// The shared memory of a thread's totals. It is free from the end of a work item's last chunk to the end of the next
// one's first chunk.
template <class T>
__device__ __forceinline__ void* thread_scratch(Storage<T>& shared, int pass) {
  constexpr int kOwn = (T::kColumns / 2 - T::kTotalsInRegs) / 4;
  static_assert(QRows<T>::kPasses <= kOwn, "a thread's parts of Q fit in the memory of its totals");
  return &shared.totals[threadIdx.x / 128 * kOwn + pass][threadIdx.x % 128];
}

// With kPrefetchQ: starts copying the thread's parts of the next work item's Q, if there is one.
template <class T>
__device__ __forceinline__ void prefetch_q(const AttentionParams& p, Storage<T>& shared, int warpgroup_m) {
  if (shared.next.chunks == 0) return;
  const QRows<T> rows(p, shared.next, warpgroup_m);
#pragma unroll
  for (int i = 0; i < QRows<T>::kPasses; ++i) ptx::cp_async_16(thread_scratch(shared, i), rows.at(i), 16);
  ptx::cp_async_commit();
}

// Quantizes kCount passes from first_pass on. words[i]: the thread's part in pass first_pass + i. Writes E4M3 to the
// swizzled tile in shared memory, and the score scales of the rows. All passes together, to overlap their latencies.
template <class T, int kCount>
__device__ __forceinline__ void quantize_passes(Storage<T>& shared, Rows& rows, int warpgroup_m,
                                                const uint4 (&words)[kCount], int first_pass, float scale,
                                                unsigned signs) {
  using Queries = QRows<T>;
  constexpr int kLanes = Queries::kLanes;
  static_assert(kCount <= kLanes && (kCount & (kCount - 1)) == 0, "a lane divides for one pass");
  const int lane = Queries::lane(), column = Queries::column();
  float inverse = 1.0f, row_scale = 1.0f;
  if constexpr (!T::kQuantizedQ) {
    // 16-bit floats without sign compare as integers, two at a time. NaN compares as the largest.
    unsigned max_abs[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const unsigned (&pairs)[4] = reinterpret_cast<const unsigned (&)[4]>(words[i]);
      max_abs[i] = 0;
#pragma unroll
      for (int j = 0; j < 4; ++j) max_abs[i] = ptx::max_u16x2(max_abs[i], pairs[j] & 0x7fff7fffu);
    }
    reduce_row_maxima<kCount>(max_abs, lane);
#pragma unroll
    for (int step = kCount; step < kLanes; step *= 2) {
      max_abs[0] = ptx::max_u16x2(max_abs[0], __shfl_xor_sync(0xffffffffu, max_abs[0], step));
    }
    const typename T::In(&two)[2] = reinterpret_cast<const typename T::In(&)[2]>(max_abs[0]);
    float row_max = fmaxf(static_cast<float>(two[0]), static_cast<float>(two[1]));
    row_max = row_max > 0.0f ? fmaxf(row_max, 448.0f * kMinScale) : 448.0f;
    inverse = __fdiv_rn(448.0f, row_max);
    row_scale = __fdiv_rn(row_max, 448.0f);
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const int r = Queries::part_row(first_pass + i);
    uint2 codes = make_uint2(words[i].x, words[i].y);
    if constexpr (!T::kQuantizedQ) {
      const typename T::In(&in)[8] = reinterpret_cast<const typename T::In(&)[8]>(words[i]);
      const float by = __shfl_sync(0xffffffffu, inverse, i, kLanes);
      float x[8];
#pragma unroll
      for (int j = 0; j < 8; ++j) x[j] = static_cast<float>(in[j]) * by;
      const float low[4] = {x[0], x[1], x[2], x[3]}, high[4] = {x[4], x[5], x[6], x[7]};
      codes = make_uint2(ptx::pack_e4m3(low), ptx::pack_e4m3(high));
    }
    if (r >= T::kWarpgroupRows) continue;
    codes.x ^= signs;
    codes.y ^= signs;
    const int swizzle = T::kPanel == 128 ? r % 8 : r / 2 % 4;  // TMA swizzle
    unsigned char* const dst = shared.q[warpgroup_m][column / T::kPanel] + r * T::kPanel;
    *reinterpret_cast<uint2*>(dst + ((column % T::kPanel / 16) ^ swizzle) * 16 + column % 16) = codes;
    if (lane == i) {
      const float factor = row_scale * scale;
      rows.scale_log2[r] = factor < kMinFactor ? kMinFactor : factor;
    }
  }
}

// Quantizes the warpgroup's rows of Q, by all threads that share them.
template <class T>
__device__ __forceinline__ void quantize_q(const AttentionParams& p, Storage<T>& shared, Rows& rows, int warpgroup_m,
                                           const Work& work, float scale, unsigned signs) {
  using Queries = QRows<T>;
  constexpr int kPasses = Queries::kPasses;
  if constexpr (T::kPrefetchQ) {
    constexpr int kBatch = kPasses < 8 ? kPasses : 8;  // two iterations at head dim 256, to halve the code
    ptx::cp_async_wait<0>();
#pragma unroll 1
    for (int first = 0; first < kPasses; first += kBatch) {
      uint4 words[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) words[i] = *static_cast<const uint4*>(thread_scratch(shared, first + i));
      quantize_passes<T>(shared, rows, warpgroup_m, words, first, scale, signs);
    }
  } else {
    uint4 words[kPasses];
    const Queries queries(p, work, warpgroup_m);
    const unsigned char* const raw = shared.staged_q + Queries::column() * Queries::kBytes;
    const bool fetched = T::kStagedQRows > 0 && work.tile.rows(T::kRows, p.batch.group) <= T::kStagedQRows;
#pragma unroll
    for (int i = 0; i < kPasses; ++i) {
      const void* from = queries.at(i);
      if (fetched) from = raw + (queries.row(i) - work.tile.first_row) * T::kQRowBytes;
      if constexpr (T::kQuantizedQ) {
        const uint2 codes = *static_cast<const uint2*>(from);
        words[i].x = codes.x;
        words[i].y = codes.y;
      } else {
        words[i] = *static_cast<const uint4*>(from);
      }
    }
    quantize_passes<T>(shared, rows, warpgroup_m, words, 0, scale, signs);
  }
}

}  // namespace greenfast::serving

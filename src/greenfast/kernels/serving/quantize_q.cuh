// Q as the consumers read it: quantized, with a scale for each row.
#pragma once

#include "ptx/e4m3.cuh"
#include "ptx/math.cuh"
#include "serving/traits.cuh"

namespace greenfast::serving {

// Of the threads that share rows.
template <class T>
__device__ __forceinline__ int row_thread() {
  return threadIdx.x % T::kRowThreads;
}

// Of two lanes, one goes on with half of the rows, the other with the others: to a row's maximum in the lane whose
// number is the row's, and which does its divisions. x[i]: of the lane's numbers of row i.
template <int kRows, int kCount>
__device__ __forceinline__ void share_maxima(unsigned (&x)[kCount], int lane) {
  if constexpr (kRows > 1) {
    constexpr int kHalf = kRows / 2;
    const bool second = lane & kHalf;
#pragma unroll
    for (int i = 0; i < kHalf; ++i) {
      const unsigned kept = second ? x[i + kHalf] : x[i], given = second ? x[i] : x[i + kHalf];
      x[i] = ptx::max_u16x2(kept, __shfl_xor_sync(0xffffffffu, given, kHalf));
    }
    share_maxima<kHalf>(x, lane);
  }
}

// By the threads that share row_part's rows: a row's numbers divided by its largest, as E4M3, into the swizzled tile that
// the products read, and the factors of its scores. Eight numbers are a thread's, of several rows, all at the same time:
// what a row waits for, the others hide. Rows behind the last are copies of it.
template <class T>
__device__ __forceinline__ void quantize_queries(const AttentionParams& p, Storage<T>& shared, Rows& rows, int row_part,
                                                 const Work& work, float scale, unsigned signs) {
  constexpr int kLanes = T::kHeadDim / 8, kAtOnce = T::kRowThreads / kLanes;  // threads of a row; rows
  constexpr int kPasses = (T::kPartRows + kAtOnce - 1) / kAtOnce;
  static_assert(kPasses <= kLanes && (kPasses & (kPasses - 1)) == 0, "a lane divides for one pass");
  constexpr int kBytes = T::kRawBytes / T::kHeadDim;
  const RowTile& tile = work.tile;
  const int group = p.batch.group, first = tile.first_row + row_part * 64, stop = tile.q_len * group;
  const int lane = row_thread<T>() % kLanes, column = lane * 8, first_row = row_thread<T>() / kLanes;
  const bool fetched = T::kRawRows > 0 && tile.rows(T::kRows, group) <= T::kRawRows;
  // In 8 bytes, of which strides are multiples: products of 32 bits, where 64 would be most of the instructions here.
  // In a group of one, rows are tokens, and group_inverse is 0.
  const uint2* const of_tile = reinterpret_cast<const uint2*>(
      static_cast<const unsigned char*>(p.q) +
      (tile.q_begin * p.q_token + work.head * group * p.q_head + column) * kBytes);
  const int token_step = static_cast<int>(p.q_token * kBytes / 8);
  const int head_step = group == 1 ? token_step : static_cast<int>(p.q_head * kBytes / 8);
  uint4 words[kPasses];
#pragma unroll
  for (int i = 0; i < kPasses; ++i) {
    const int of_part = first_row + i * kAtOnce;
    const int row = min(first + (kPasses * kAtOnce > T::kPartRows ? min(of_part, T::kPartRows - 1) : of_part), stop - 1);
    const int token = static_cast<int>(__umulhi(row, p.batch.group_inverse)), head = row - token * group;
    const void* from = of_tile + ptx::mad_wide(token, token_step, ptx::mad_wide(head, head_step, 0));
    if (fetched) from = shared.raw_q + (row - tile.first_row) * T::kRawBytes + column * kBytes;
    if constexpr (T::kCodedQueries) {
      const uint2 codes = *static_cast<const uint2*>(from);
      words[i].x = codes.x;
      words[i].y = codes.y;
    } else {
      words[i] = *static_cast<const uint4*>(from);
    }
  }
  float inverse = 1.0f, of_row = 1.0f;
  if constexpr (!T::kCodedQueries) {
    // Without their signs, floats of 16 bits compare as integers, two at a time. A NaN is then the largest.
    unsigned largest[kPasses];
#pragma unroll
    for (int i = 0; i < kPasses; ++i) {
      const unsigned(&pairs)[4] = reinterpret_cast<const unsigned(&)[4]>(words[i]);
      largest[i] = 0;
#pragma unroll
      for (int j = 0; j < 4; ++j) largest[i] = ptx::max_u16x2(largest[i], pairs[j] & 0x7fff7fffu);
    }
    share_maxima<kPasses>(largest, lane);
#pragma unroll
    for (int step = kPasses; step < kLanes; step *= 2) {
      largest[0] = ptx::max_u16x2(largest[0], __shfl_xor_sync(0xffffffffu, largest[0], step));
    }
    const typename T::In(&two)[2] = reinterpret_cast<const typename T::In(&)[2]>(largest[0]);
    float mine = fmaxf(static_cast<float>(two[0]), static_cast<float>(two[1]));
    mine = mine > 0.0f ? fmaxf(mine, 448.0f * kLeastScale) : 448.0f;
    inverse = __fdiv_rn(448.0f, mine);
    of_row = __fdiv_rn(mine, 448.0f);
  }
#pragma unroll
  for (int i = 0; i < kPasses; ++i) {
    const int r = first_row + i * kAtOnce;
    uint2 codes = make_uint2(words[i].x, words[i].y);
    if constexpr (!T::kCodedQueries) {
      const typename T::In(&in)[8] = reinterpret_cast<const typename T::In(&)[8]>(words[i]);
      const float by = __shfl_sync(0xffffffffu, inverse, i, kLanes);
      float x[8];
#pragma unroll
      for (int j = 0; j < 8; ++j) x[j] = static_cast<float>(in[j]) * by;
      const float low[4] = {x[0], x[1], x[2], x[3]}, high[4] = {x[4], x[5], x[6], x[7]};
      codes = make_uint2(ptx::pack_e4m3(low), ptx::pack_e4m3(high));
    }
    if (r >= T::kPartRows) continue;
    codes.x ^= signs;
    codes.y ^= signs;
    const int turn = T::kPanel == 128 ? r % 8 : r / 2 % 4;  // the copy engine's swizzle
    unsigned char* const to = shared.q[row_part][column / T::kPanel] + r * T::kPanel;
    *reinterpret_cast<uint2*>(to + ((column % T::kPanel / 16) ^ turn) * 16 + column % 16) = codes;
    if (lane == i) {
      const float factor = of_row * scale;
      rows.factor[r] = factor < kLeast ? kLeast : factor;
    }
  }
}

}  // namespace greenfast::serving

// Q as the consumers read it: quantized, with a scale for each row.
#pragma once

#include "ptx/cp_async.cuh"
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

// Which rows of Q in global memory a thread has parts of, of a row part: eight numbers of one in each pass. Rows behind
// the last are copies of it.
template <class T>
struct QueryRows {
  static constexpr int kLanes = T::kHeadDim / 8, kAtOnce = T::kRowThreads / kLanes;  // threads of a row; rows
  static constexpr int kPasses = (T::kPartRows + kAtOnce - 1) / kAtOnce;
  static constexpr int kBytes = T::kRawBytes / T::kHeadDim;
  // In 8 bytes, of which strides are multiples: products of 32 bits, where 64 would be most of the instructions here.
  const uint2* of_tile;
  int token_step, head_step, group, first, stop;
  unsigned group_inverse;

  __device__ __forceinline__ QueryRows(const AttentionParams& p, const Work& work, int row_part)
      : of_tile(reinterpret_cast<const uint2*>(
            static_cast<const unsigned char*>(p.q) +
            (work.tile.q_begin * p.q_token + work.head * p.batch.group * p.q_head + column()) * kBytes)),
        token_step(static_cast<int>(p.q_token * kBytes / 8)),
        head_step(p.batch.group == 1 ? token_step : static_cast<int>(p.q_head * kBytes / 8)),
        group(p.batch.group),
        first(work.tile.first_row + row_part * 64),
        stop(work.tile.q_len * p.batch.group),
        group_inverse(p.batch.group_inverse) {}
  __device__ __forceinline__ static int lane() { return row_thread<T>() % kLanes; }
  __device__ __forceinline__ static int column() { return lane() * 8; }
  __device__ __forceinline__ static int of_part(int pass) { return row_thread<T>() / kLanes + pass * kAtOnce; }
  __device__ __forceinline__ int row(int pass) const {
    return min(first + (kPasses * kAtOnce > T::kPartRows ? min(of_part(pass), T::kPartRows - 1) : of_part(pass)),
               stop - 1);
  }
  // In a group of one, rows are tokens, and group_inverse is 0.
  __device__ __forceinline__ const void* at(int pass) const {
    const int token = static_cast<int>(__umulhi(row(pass), group_inverse)), head = row(pass) - token * group;
    return of_tile + ptx::mad_wide(token, token_step, ptx::mad_wide(head, head_step, 0));
  }
};

// Memory of a thread's own sums, which is free from the end of a work's last chunk to that of the next one's first.
template <class T>
__device__ __forceinline__ void* own_memory(Storage<T>& shared, int pass) {
  constexpr int kOwn = (T::kColumns / 2 - T::kHeld) / 4;
  static_assert(QueryRows<T>::kPasses <= kOwn, "a thread's parts of Q lie in the memory of its sums");
  return &shared.totals[threadIdx.x / 128 * kOwn + pass][threadIdx.x % 128];
}

// With kQueriesAhead: starts copying what the thread will quantize of the next work, if there is one.
template <class T>
__device__ __forceinline__ void fetch_queries_ahead(const AttentionParams& p, Storage<T>& shared, int row_part) {
  if (shared.next.chunks == 0) return;
  const QueryRows<T> rows(p, shared.next, row_part);
#pragma unroll
  for (int i = 0; i < QueryRows<T>::kPasses; ++i) ptx::cp_async_16(own_memory(shared, i), rows.at(i), 16);
  ptx::cp_async_commit();
}

// A thread's parts of kCount passes from `first_pass` on, words[i] of pass first_pass + i: each divided by the largest
// number of its row, as E4M3, into the swizzled tile that the products read, and the factors of the rows' scores. All
// at the same time: what a row waits for, the others hide.
template <class T, int kCount>
__device__ __forceinline__ void quantize_passes(Storage<T>& shared, Rows& rows, int row_part,
                                                const uint4 (&words)[kCount], int first_pass, float scale,
                                                unsigned signs) {
  using Queries = QueryRows<T>;
  constexpr int kLanes = Queries::kLanes;
  static_assert(kCount <= kLanes && (kCount & (kCount - 1)) == 0, "a lane divides for one pass");
  const int lane = Queries::lane(), column = Queries::column();
  float inverse = 1.0f, of_row = 1.0f;
  if constexpr (!T::kCodedQueries) {
    // Without their signs, floats of 16 bits compare as integers, two at a time. A NaN is then the largest.
    unsigned largest[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const unsigned(&pairs)[4] = reinterpret_cast<const unsigned(&)[4]>(words[i]);
      largest[i] = 0;
#pragma unroll
      for (int j = 0; j < 4; ++j) largest[i] = ptx::max_u16x2(largest[i], pairs[j] & 0x7fff7fffu);
    }
    share_maxima<kCount>(largest, lane);
#pragma unroll
    for (int step = kCount; step < kLanes; step *= 2) {
      largest[0] = ptx::max_u16x2(largest[0], __shfl_xor_sync(0xffffffffu, largest[0], step));
    }
    const typename T::In(&two)[2] = reinterpret_cast<const typename T::In(&)[2]>(largest[0]);
    float mine = fmaxf(static_cast<float>(two[0]), static_cast<float>(two[1]));
    mine = mine > 0.0f ? fmaxf(mine, 448.0f * kLeastScale) : 448.0f;
    inverse = __fdiv_rn(448.0f, mine);
    of_row = __fdiv_rn(mine, 448.0f);
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const int r = Queries::of_part(first_pass + i);
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

// By the threads that share row_part's rows: Q as the products read it.
template <class T>
__device__ __forceinline__ void quantize_queries(const AttentionParams& p, Storage<T>& shared, Rows& rows, int row_part,
                                                 const Work& work, float scale, unsigned signs) {
  using Queries = QueryRows<T>;
  constexpr int kPasses = Queries::kPasses;
  if constexpr (T::kQueriesAhead) {
    constexpr int kTogether = kPasses < 8 ? kPasses : 8;  // at head dim 256 in two turns of a loop: half of the code
    ptx::cp_async_wait<0>();
#pragma unroll 1
    for (int first = 0; first < kPasses; first += kTogether) {
      uint4 words[kTogether];
#pragma unroll
      for (int i = 0; i < kTogether; ++i) words[i] = *static_cast<const uint4*>(own_memory(shared, first + i));
      quantize_passes<T>(shared, rows, row_part, words, first, scale, signs);
    }
  } else {
    uint4 words[kPasses];
    const Queries queries(p, work, row_part);
    const unsigned char* const raw = shared.raw_q + Queries::column() * Queries::kBytes;
    const bool fetched = T::kRawRows > 0 && work.tile.rows(T::kRows, p.batch.group) <= T::kRawRows;
#pragma unroll
    for (int i = 0; i < kPasses; ++i) {
      const void* from = queries.at(i);
      if (fetched) from = raw + (queries.row(i) - work.tile.first_row) * T::kRawBytes;
      if constexpr (T::kCodedQueries) {
        const uint2 codes = *static_cast<const uint2*>(from);
        words[i].x = codes.x;
        words[i].y = codes.y;
      } else {
        words[i] = *static_cast<const uint4*>(from);
      }
    }
    quantize_passes<T>(shared, rows, row_part, words, 0, scale, signs);
  }
}

}  // namespace greenfast::serving

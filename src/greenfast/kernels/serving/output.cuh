// O of a consumer warpgroup's 64 rows: of the present chunk of keys, summed over the chunks before it, and how it is
// written.
#pragma once

#include <math_constants.h>

#include "attention/epilogue.cuh"
#include "ptx/store.cuh"
#include "serving/merge.cuh"
#include "serving/softmax.cuh"

namespace greenfast::serving {

// A thread's rows and columns of O are those of scores (Softmax). An aggregate, as Results is.
template <class T>
struct Output : Results<T> {
  using Base = Results<T>;
  using Base::p, Base::rows, Base::shared;
  using Base::out_row, Base::pair, Base::partial, Base::partial_rows, Base::unit_of;
  using typename Base::Finish;
  static constexpr int kOut = T::kColumns / 2;

  Sums& sums;
  const int row_part, column_part;
  float o[kOut];                            // of the present chunk
  float held[T::kHeld > 0 ? T::kHeld : 1];  // of the sums over the chunks before it
  bool begun;                               // whether there is such a chunk

  // Registers 4 i to 4 i + 3 of O, summed over the chunks that have ended.
  __device__ __forceinline__ float4& shared_total(int i) const {
    constexpr int kShared = (kOut - T::kHeld) / 4;
    return shared.totals[threadIdx.x / 128 * kShared + i - T::kHeld / 4][threadIdx.x % 128];
  }
  __device__ __forceinline__ float4 total(int i) const {
    if (4 * i >= T::kHeld) return shared_total(i);
    return make_float4(held[4 * i], held[4 * i + 1], held[4 * i + 2], held[4 * i + 3]);
  }
  __device__ __forceinline__ void set_total(int i, const float4& x) {
    if (4 * i >= T::kHeld) {
      shared_total(i) = x;
    } else {
      held[4 * i] = x.x;
      held[4 * i + 1] = x.y;
      held[4 * i + 2] = x.z;
      held[4 * i + 3] = x.w;
    }
  }

  // Adds a chunk, whose O is in `o`, to those before it; or leaves it as a partial result. chunk: of the sequence.
  // kLast: of the work, whose result is then in `o`.
  template <bool kLast>
  __device__ __forceinline__ void end_chunk(int chunk) {
    if (rows.work.begin > 0) {
      leave(chunk - rows.work.tile.first_chunk() - rows.work.begin, sums.max, sums.sum);
    } else {
      float before[2], after[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int at = own_row() + 8 * r;
        float top = sums.all_max[at];
        const Merge merge(top, sums.max[at]);
        const float total = merge(sums.all_sum[at], sums.sum[at]);
        __syncwarp();
        sums.all_max[at] = top;
        sums.all_sum[at] = total;
        before[r] = merge.before;
        after[r] = merge.after;
      }
      if (!T::kSharedTotals || begun) {
#pragma unroll
        for (int i = 0; i < kOut / 4; ++i) {
          const float4 x = total(i);
          o[4 * i] = Merge::of(x.x, before[0], o[4 * i], after[0]);
          o[4 * i + 1] = Merge::of(x.y, before[0], o[4 * i + 1], after[0]);
          o[4 * i + 2] = Merge::of(x.z, before[1], o[4 * i + 2], after[1]);
          o[4 * i + 3] = Merge::of(x.w, before[1], o[4 * i + 3], after[1]);
          if constexpr (!kLast) set_total(i, make_float4(o[4 * i], o[4 * i + 1], o[4 * i + 2], o[4 * i + 3]));
        }
      } else {
#pragma unroll
        for (int i = 0; i < kOut; ++i) o[i] += 0.0f;  // -0 becomes 0, as in the sum with what came before
        if constexpr (!kLast) {
#pragma unroll
          for (int i = 0; i < kOut / 4; ++i) {
            set_total(i, make_float4(o[4 * i], o[4 * i + 1], o[4 * i + 2], o[4 * i + 3]));
          }
        }
      }
      begun = true;
    }
    if constexpr (!kLast) {
#pragma unroll
      for (float& x : o) x = 0.0f;
    }
  }

  // Leaves what is in `o`.
  __device__ __forceinline__ void leave(int slot, const float (&of_max)[64], const float (&of_sum)[64]) const {
    float* const to = partial(blockIdx.x * (p.slots + 1) + min(slot, p.slots));  // more only with a wrong plan
    const int stop = partial_rows(rows.work.tile), quad = threadIdx.x % 4;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int at = row_part * 64 + own_row() + 8 * r;
      if (at >= stop) continue;
      float* const out = to + at * T::kHeadDim + column_part * T::kColumns + 2 * quad;
#pragma unroll
      for (int j = 0; j < T::kColumns / 8; ++j) {
        *reinterpret_cast<float2*>(out + 8 * j) = make_float2(o[4 * j + 2 * r], o[4 * j + 2 * r + 1]);
      }
      if (quad == 0 && column_part == 0) {
        to[p.slot_rows * T::kHeadDim + at] = of_max[own_row() + 8 * r];
        to[p.slot_rows * (T::kHeadDim + 1) + at] = of_sum[own_row() + 8 * r];
      }
    }
  }

  // Writes the rows of a tile that this block has worked on alone. Without a branch: the rows' chains run together.
  __device__ __forceinline__ void store(const Work& work) {
    const int stop = work.tile.rows(T::kRows, p.batch.group), quad = threadIdx.x % 4;
    const float unit = T::kScalesAhead ? rows.unit : unit_of(work);
    const auto row = [&](int r) { return row_part * 64 + own_row() + 8 * r; };
    const auto finish = [&](int r) {
      const int of_part = own_row() + 8 * r;
      return Finish(p, work, min(row(r), stop - 1), sums.all_max[of_part], sums.all_sum[of_part],
                    row(r) < stop && quad == 0 && column_part == 0, unit);
    };
    const Finish finishes[2] = {finish(0), finish(1)};
    typename T::Out* const outs[2] = {out_row(work, min(row(0), stop - 1)) + column_part * T::kColumns,
                                      out_row(work, min(row(1), stop - 1)) + column_part * T::kColumns};
    if (p.sinks != nullptr) {
#pragma unroll
      for (int i = 0; i < kOut; ++i) o[i] *= finishes[i / 2 % 2].before;
    }
#pragma unroll
    for (int j = 0; j < T::kColumns / 8; j += 4) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        unsigned x[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float factor = finishes[r].factor;
          x[i] = pair(o[4 * (j + i) + 2 * r] * factor, o[4 * (j + i) + 2 * r + 1] * factor);
        }
        transpose_quad(x);
        ptx::store_16_if(row(r) < stop, outs[r] + 8 * (j + quad), x);
      }
    }
  }
};

}  // namespace greenfast::serving

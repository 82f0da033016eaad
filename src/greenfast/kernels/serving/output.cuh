// O of a consumer warpgroup's 64 rows: the current chunk, the sum over earlier chunks, and the epilogue.
#pragma once

#include <math_constants.h>

#include "attention/epilogue.cuh"
#include "ptx/store.cuh"
#include "serving/merge.cuh"
#include "serving/softmax.cuh"

namespace greenfast::serving {

// O has the register layout of the scores (see Softmax). An aggregate, as Results is.
template <class T>
struct Output : Results<T> {
  using Base = Results<T>;
  using Base::out_row, Base::pair, Base::partial, Base::partial_rows, Base::v_scale_of;
  using Base::p, Base::rows, Base::shared;
  using typename Base::RowFinalizer;
  static constexpr int kOut = T::kColumns / 2;

  RowStats& stats;
  const int warpgroup_m, warpgroup_n;
  float o[kOut];  // O of the current chunk
  float reg_totals[T::kTotalsInRegs > 0 ? T::kTotalsInRegs
                                        : 1];  // O summed over earlier chunks (its first kTotalsInRegs values)
  bool has_totals;                             // whether there is an earlier chunk

  // Registers 4 i .. 4 i + 3 of O summed over earlier chunks.
  __device__ __forceinline__ float4& smem_total(int i) const {
    constexpr int kShared = (kOut - T::kTotalsInRegs) / 4;
    return shared.totals[threadIdx.x / 128 * kShared + i - T::kTotalsInRegs / 4][threadIdx.x % 128];
  }
  __device__ __forceinline__ float4 total(int i) const {
    if (4 * i >= T::kTotalsInRegs) return smem_total(i);
    return make_float4(reg_totals[4 * i], reg_totals[4 * i + 1], reg_totals[4 * i + 2], reg_totals[4 * i + 3]);
  }
  __device__ __forceinline__ void set_total(int i, const float4& x) {
    if (4 * i >= T::kTotalsInRegs) {
      smem_total(i) = x;
    } else {
      reg_totals[4 * i] = x.x;
      reg_totals[4 * i + 1] = x.y;
      reg_totals[4 * i + 2] = x.z;
      reg_totals[4 * i + 3] = x.w;
    }
  }

  // Adds the finished chunk (in `o`) to the total, or writes it as a partial result. chunk: its index in the sequence.
  // kLast: the work item's last chunk; `o` is then the total.
  template <bool kLast>
  __device__ __forceinline__ void flush_chunk(int chunk) {
    if (rows.work.begin > 0) {
      write_partial(chunk - rows.work.tile.first_chunk() - rows.work.begin, stats.max, stats.sum);
    } else {
      float before[2], after[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int row = thread_row() + 8 * r;
        float total_max = stats.total_max[row];
        const Merge merge(total_max, stats.max[row]);
        const float total = merge(stats.total_sum[row], stats.sum[row]);
        __syncwarp();
        stats.total_max[row] = total_max;
        stats.total_sum[row] = total;
        before[r] = merge.before;
        after[r] = merge.after;
      }
      if (!T::kSharedTotals || has_totals) {
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
        for (int i = 0; i < kOut; ++i) o[i] += 0.0f;  // -0 becomes 0, as in a sum with an earlier chunk
        if constexpr (!kLast) {
#pragma unroll
          for (int i = 0; i < kOut / 4; ++i) {
            set_total(i, make_float4(o[4 * i], o[4 * i + 1], o[4 * i + 2], o[4 * i + 3]));
          }
        }
      }
      has_totals = true;
    }
    if constexpr (!kLast) {
#pragma unroll
      for (float& x : o) x = 0.0f;
    }
  }

  // Writes `o` with row maxima and sums to a partial-result slot.
  __device__ __forceinline__ void write_partial(int slot, const float (&row_max)[64],
                                                const float (&row_sum)[64]) const {
    float* const dst =
        partial(blockIdx.x * (p.slots + 1) + min(slot, p.slots));  // the clamp matters only for an invalid plan
    const int stop = partial_rows(rows.work.tile), quad = threadIdx.x % 4;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = warpgroup_m * 64 + thread_row() + 8 * r;
      if (row >= stop) continue;
      float* const out = dst + row * T::kHeadDim + warpgroup_n * T::kColumns + 2 * quad;
#pragma unroll
      for (int j = 0; j < T::kColumns / 8; ++j) {
        *reinterpret_cast<float2*>(out + 8 * j) = make_float2(o[4 * j + 2 * r], o[4 * j + 2 * r + 1]);
      }
      if (quad == 0 && warpgroup_n == 0) {
        dst[p.slot_rows * T::kHeadDim + row] = row_max[thread_row() + 8 * r];
        dst[p.slot_rows * (T::kHeadDim + 1) + row] = row_sum[thread_row() + 8 * r];
      }
    }
  }

  // Writes O and LSE of a row tile that only this block worked on. Free of branches, so that the two rows' dependency
  // chains overlap.
  __device__ __forceinline__ void store(const Work& work) {
    const int stop = work.tile.rows(T::kRows, p.batch.group), quad = threadIdx.x % 4;
    const float v_scale = T::kPrefetchScales ? rows.v_scale : v_scale_of(work);
    const auto row = [&](int r) { return warpgroup_m * 64 + thread_row() + 8 * r; };
    const auto finalize = [&](int r) {
      const int part_row = thread_row() + 8 * r;
      return RowFinalizer(p, work, min(row(r), stop - 1), stats.total_max[part_row], stats.total_sum[part_row],
                          row(r) < stop && quad == 0 && warpgroup_n == 0, v_scale);
    };
    const RowFinalizer finalizers[2] = {finalize(0), finalize(1)};
    typename T::Out* const outs[2] = {out_row(work, min(row(0), stop - 1)) + warpgroup_n * T::kColumns,
                                      out_row(work, min(row(1), stop - 1)) + warpgroup_n * T::kColumns};
    if (p.sinks != nullptr) {
#pragma unroll
      for (int i = 0; i < kOut; ++i) o[i] *= finalizers[i / 2 % 2].before;
    }
#pragma unroll
    for (int j = 0; j < T::kColumns / 8; j += 4) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        unsigned x[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float factor = finalizers[r].factor;
          x[i] = pair(o[4 * (j + i) + 2 * r] * factor, o[4 * (j + i) + 2 * r + 1] * factor);
        }
        transpose_quad(x);
        ptx::store_16_if(row(r) < stop, outs[r] + 8 * (j + quad), x);
      }
    }
  }
};

}  // namespace greenfast::serving

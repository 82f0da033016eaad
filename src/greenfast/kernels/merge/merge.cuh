// Merges two partial results of attention, over different keys, in fp32. Each is weighted by its share of the sum of
// exponentials, from the two LSEs (as between blocks of keys in FlashAttention, Dao et al., 2022).
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <math_constants.h>

#include "common/bytes.cuh"
#include "ptx/math.cuh"

namespace greenfast {

template <class T>
struct MergeRows {
  T* data;
  long long batch, head, row;  // strides in elements; columns are contiguous

  __device__ __forceinline__ T* row_ptr(int batch_index, int head_index, int row_index) const {
    return data + batch_index * batch + head_index * head + row_index * row;
  }
};

// Cfg: kColumns, a multiple of 8; A, B and Out, the element types; kInPlace: out is a.
template <class Cfg>
struct MergeParams {
  MergeRows<const typename Cfg::A> a;
  MergeRows<const typename Cfg::B> b;
  MergeRows<typename Cfg::Out> out;
  const float *lse_a, *lse_b;  // a: (batch x heads, rows); b: (batch x heads, rows - first)
  float* lse_out;              // must not alias lse_a: other threads of the row still read it
  int heads, rows;
  int first;  // the first row of b; earlier rows are copied from a
};

// Grid: (vectors of 8 columns of all rows / threads, batch x heads). One thread per vector.
template <class Cfg>
__device__ __forceinline__ void merge(const MergeParams<Cfg>& p) {
  constexpr int kVector = 8, kVectors = Cfg::kColumns / kVector;
  const int index = blockIdx.x * blockDim.x + threadIdx.x, row = index / kVectors;
  const int column = index % kVectors * kVector, head_index = blockIdx.y, batch = head_index / p.heads,
            head = head_index % p.heads;
  if (row >= p.rows) return;
  const bool in_both = row >= p.first;
  const long long row_index = static_cast<long long>(head_index) * p.rows + row;
  const float lse_a = p.lse_a[row_index];
  if (Cfg::kInPlace && !in_both) {
    if (column == 0) p.lse_out[row_index] = lse_a;
    return;
  }
  const float lse_b =
      in_both ? p.lse_b[static_cast<long long>(head_index) * (p.rows - p.first) + row - p.first] : -CUDART_INF_F;
  const float max_lse = ptx::max_nan(lse_a, lse_b), base = max_lse == -CUDART_INF_F ? 0.0f : max_lse;
  const float weight_a = expf(lse_a - base), weight_b = expf(lse_b - base), sum = weight_a + weight_b;
  const float inverse = sum == 0.0f ? 0.0f : 1.0f / sum;  // no keys at all
  const auto a = *reinterpret_cast<const Pack<typename Cfg::A, kVector>*>(p.a.row_ptr(batch, head, row) + column);
  Pack<typename Cfg::B, kVector> b = {};
  if (in_both) {
    b = *reinterpret_cast<const Pack<typename Cfg::B, kVector>*>(p.b.row_ptr(batch, head, row - p.first) + column);
  }
  Pack<typename Cfg::Out, kVector> out;
#pragma unroll
  for (int i = 0; i < kVector; ++i) {
    const float from_a = static_cast<float>(a.values[i]) * (weight_a * inverse);
    const float from_b = static_cast<float>(b.values[i]) * (weight_b * inverse);
    out.values[i] = static_cast<typename Cfg::Out>(in_both ? from_a + from_b : static_cast<float>(a.values[i]));
  }
  *reinterpret_cast<Pack<typename Cfg::Out, kVector>*>(p.out.row_ptr(batch, head, row) + column) = out;
  if (column == 0) p.lse_out[row_index] = logf(sum) + base;
}

}  // namespace greenfast

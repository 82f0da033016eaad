// Two results of attention of the same queries over different keys to the one over all of them, in float32, by their
// log-sum-exps: what a query gets of each is its share of the sum of exponentials (FlashAttention's rule, Dao et al.
// 2022, between blocks of keys).
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
  long long batch, head, row;  // strides in elements; columns are neighbours

  __device__ __forceinline__ T* at(int of_batch, int of_head, int of_row) const {
    return data + of_batch * batch + of_head * head + of_row * row;
  }
};

// Cfg: kColumns, a multiple of 8; A, B and Out, the types of the results; kInPlace, whether out is a.
template <class Cfg>
struct MergeParams {
  MergeRows<const typename Cfg::A> a;
  MergeRows<const typename Cfg::B> b;
  MergeRows<typename Cfg::Out> out;
  const float *lse_a, *lse_b;  // (batch x heads, rows), and of b (batch x heads, rows - first)
  float* lse_out;              // another buffer than lse_a: other threads of the row still read that
  int heads, rows;
  int first;  // the first row that b has; the rows before it become a's
};

// Grid: (vectors of 8 columns of all rows, over the block; batch x heads). No memory is read twice but the sums.
template <class Cfg>
__device__ __forceinline__ void merge(const MergeParams<Cfg>& p) {
  constexpr int kVector = 8, kVectors = Cfg::kColumns / kVector;
  const int index = blockIdx.x * blockDim.x + threadIdx.x, row = index / kVectors;
  const int column = index % kVectors * kVector, line = blockIdx.y, batch = line / p.heads, head = line % p.heads;
  if (row >= p.rows) return;
  const bool shared = row >= p.first;
  const long long at = static_cast<long long>(line) * p.rows + row;
  const float lse_a = p.lse_a[at];
  if (Cfg::kInPlace && !shared) {
    if (column == 0) p.lse_out[at] = lse_a;
    return;
  }
  const float lse_b =
      shared ? p.lse_b[static_cast<long long>(line) * (p.rows - p.first) + row - p.first] : -CUDART_INF_F;
  const float top = ptx::max_nan(lse_a, lse_b), base = top == -CUDART_INF_F ? 0.0f : top;
  const float share_a = expf(lse_a - base), share_b = expf(lse_b - base), sum = share_a + share_b;
  const float inverse = sum == 0.0f ? 0.0f : 1.0f / sum;  // no keys at all: 0
  const auto a = *reinterpret_cast<const Pack<typename Cfg::A, kVector>*>(p.a.at(batch, head, row) + column);
  Pack<typename Cfg::B, kVector> b = {};
  if (shared) {
    b = *reinterpret_cast<const Pack<typename Cfg::B, kVector>*>(p.b.at(batch, head, row - p.first) + column);
  }
  Pack<typename Cfg::Out, kVector> out;
#pragma unroll
  for (int i = 0; i < kVector; ++i) {
    const float of_a = static_cast<float>(a.values[i]) * (share_a * inverse);
    const float of_b = static_cast<float>(b.values[i]) * (share_b * inverse);
    out.values[i] = static_cast<typename Cfg::Out>(shared ? of_a + of_b : static_cast<float>(a.values[i]));
  }
  *reinterpret_cast<Pack<typename Cfg::Out, kVector>*>(p.out.at(batch, head, row) + column) = out;
  if (column == 0) p.lse_out[at] = logf(sum) + base;
}

}  // namespace greenfast

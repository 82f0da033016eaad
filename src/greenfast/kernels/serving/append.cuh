// Appends Q, K and V of new tokens, as projections write them, to a paged FP8 cache in one launch: QK-norm, RoPE,
// quantization, and the store to slots; Q is written as the attention kernel reads it. numerics/serving_append.py has
// the same arithmetic in the same order: float32, no fused multiply-add, one rounding at the end.
//
// D / 16 threads share a row of a head, 16 columns each, so that RoPE pairs are in one thread. For Q, K and row-major
// V, they keep the token and iterate over heads: angles, weights and addresses are computed once. Grouped V is
// transposed through shared memory (append_values.cuh).
#pragma once

#include "ptx/griddepcontrol.cuh"
#include "serving/append_row.cuh"
#include "serving/append_values.cuh"

namespace greenfast {

enum class AppendKind { kQuery, kKey, kValue };

// Processes heads first .. last - 1 for the tokens of a tile of kRows tokens.
template <class Cfg, AppendKind kKind>
__device__ __forceinline__ void append_rows(const AppendParams& p, const AppendInput& input, const AppendPages& pages,
                                            int tile, int first, int last) {
  using Row = AppendRow<Cfg>;
  constexpr bool kIsQuery = kKind == AppendKind::kQuery;
  const int token = tile * Row::kRows + Row::index();
  bool present = token < p.tokens;
  const typename Cfg::In* row = Row::row(input, token, first);
  typename Row::Loaded next = Row::load(row, present);
  typename Cfg::In* out;  // the current head's row of the token, and its scale
  unsigned char* codes_out;
  float* scale;
  if constexpr (kIsQuery) {
    out = static_cast<typename Cfg::In*>(p.q_out) + (static_cast<long long>(token) * p.heads + first) * Cfg::kHeadDim;
  } else {
    const AppendSlot<Cfg> slot(present ? p.slots[token] : -1, p.slot_count);
    present = slot.in_cache;
    codes_out = slot.row(pages, first);
    scale = Cfg::kTokenScales ? slot.scale(pages, first) : pages.scale + first * pages.scale_stride;
  }
  AppendTransform<Cfg> transform;
  if constexpr (kKind != AppendKind::kValue) transform.read(p, kIsQuery ? p.q_weight : p.k_weight, token, present);
  for (int heads = last - first; heads > 0; --heads) {
    float x[kAppendColumns];
    Row::widen(next, x);
    row += input.head_stride;
    next = Row::load(row, present && heads > 1);  // overlaps with the computation of this row
    if constexpr (kKind != AppendKind::kValue) transform.apply(x, p.eps);
    if constexpr (kIsQuery) {
      if (present) Row::write(x, out);
      out += Cfg::kHeadDim;
    } else {
      unsigned codes[kAppendColumns / 4];
      const float row_scale = Row::quantize(x, scale, codes);
      if (present) Row::write(codes, codes_out);
      if (Cfg::kTokenScales && present && Row::lane() == 0) *scale = row_scale;
      codes_out += pages.head_stride;
      scale += Cfg::kTokenScales ? Cfg::kPageSize : pages.scale_stride;
    }
  }
}

// Grid: for grouped V, one block per head and tile of kValueTokens; then, per tile of AppendRow::kRows tokens, one per
// p.chunk heads of Q, of K, and of row-major V. Block: Cfg::kThreads.
template <class Cfg>
__device__ __forceinline__ void append(const AppendParams& p) {
  ptx::launch_dependent_grids();
  int item = blockIdx.x;
  if constexpr (Cfg::kGroupedValues) {
    __shared__ AppendValuesStorage<Cfg> shared;
    const int items = (p.tokens + kValueTokens - 1) / kValueTokens * p.kv_heads;
    if (item < items) {
      AppendValues<Cfg>::run(shared, p, item / p.kv_heads * kValueTokens, item % p.kv_heads);
      return;
    }
    item -= items;
  }
  const int q_chunks = Cfg::kQueries ? (p.heads + p.chunk - 1) / p.chunk : 0;
  const int kv_chunks = (p.kv_heads + p.chunk - 1) / p.chunk;
  const int chunks = q_chunks + (Cfg::kGroupedValues ? 1 : 2) * kv_chunks, tile = item / chunks;
  item %= chunks;
  if constexpr (Cfg::kQueries) {
    if (item < q_chunks) {
      const int first = item * p.chunk;
      append_rows<Cfg, AppendKind::kQuery>(p, p.q, {}, tile, first, min(first + p.chunk, p.heads));
      return;
    }
  }
  item -= q_chunks;
  const int first = item % kv_chunks * p.chunk, last = min(first + p.chunk, p.kv_heads);
  if constexpr (!Cfg::kGroupedValues) {
    if (item >= kv_chunks) {
      append_rows<Cfg, AppendKind::kValue>(p, p.v, p.v_pages, tile, first, last);
      return;
    }
  }
  append_rows<Cfg, AppendKind::kKey>(p, p.k, p.k_pages, tile, first, last);
}

}  // namespace greenfast

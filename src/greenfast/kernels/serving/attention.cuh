// Attention over a paged FP8 cache for Hopper: prefill, chunks of it, and decode, by the same arithmetic.
//
// A producer warpgroup fetches pages of K and V; each consumer warpgroup has 64 rows of a row tile (plan.cuh), or with
// kColumnParts 2 both have the same rows and half of the columns of O each. Q is quantized where it is read, a scale for
// each row. S = Q K^T and P V by wgmma on E4M3; P V of a tile runs during the softmax of the next (FlashAttention-3,
// Shah et al., 2024). O of a chunk stays in the tensor cores' accumulators; chunks are merged in float32.
//
// Pages of K hold rows. Pages of V hold, for each 16 keys, a matrix (head_dim, 16): V transposed, its keys in the order
// in which accumulators of S are the A operand of P V (KEY_ORDER in attention/config.py). Or they hold rows, which warps
// of the producer turn into that in their stage; few_rows.cuh takes them as they are.
//
// A NaN of K, or of the scale of a token, reaches the rows that attend to the key. A NaN code of V reaches its column of
// all rows of the row tile where one of them attends to its key, as 0 times NaN is NaN: query tokens before it too, but no
// other sequence or head of K and V.
//
// In the order of reading: traits.cuh, what is compiled in, and shared memory; load.cuh, the producer; value_stage.cuh
// and quantize_q.cuh, what consumers make of V and Q; softmax.cuh; merge.cuh and output.cuh, from chunks of keys to
// O; consumer.cuh, the main loop, and few_rows.cuh, that of decoding. Here is what the kernel's entry calls.
#pragma once

#include "ptx/bulk.cuh"
#include "ptx/griddepcontrol.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"
#include "serving/consumer.cuh"
#include "serving/few_rows.cuh"
#include "serving/load.cuh"
#include "serving/traits.cuh"

namespace greenfast::serving {

// By 128 threads of each block: what the first loads wait for. Block tables are shared out among the blocks.
template <class T>
__device__ __forceinline__ void prefetch(const AttentionParams& p, const ptx::TensorMap& k_map,
                                         const ptx::TensorMap& v_map) {
  if (threadIdx.x % 128 == 0) {
    ptx::prefetch_map(k_map);
    if constexpr (T::kRowValues) ptx::prefetch_map(v_map);
    ptx::prefetch_l2(plan_of(p).share(blockIdx.x));
  }
  const long long entries = (p.batch.sequences - 1LL) * p.table_row + p.table_entries;
  const long long entry = (blockIdx.x * 128LL + threadIdx.x % 128) * 32;  // of a line
  if (entry < entries) ptx::prefetch_l2(p.block_table + entry);
}

// Grid: kBlocks per multiprocessor. Block: 128 threads for each consumer warpgroup and 128 for the producer.
// v_map: of V in rows, else anything.
template <class Cfg>
__device__ __forceinline__ void attention(const AttentionParams& p, const ptx::TensorMap& k_map,
                                          const ptx::TensorMap& v_map) {
  using T = Traits<Cfg>;
  extern __shared__ __align__(1024) unsigned char smem[];
  Storage<T>& shared = *reinterpret_cast<Storage<T>*>(smem);
  static_assert(sizeof(Storage<T>) == Cfg::kSmemBytes, "the plan of shared memory in Python differs");
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);  // known to be uniform
  if (warpgroup == T::kConsumers) prefetch<T>(p, k_map, v_map);
  if (threadIdx.x == 64) {  // of a warp that in a block of few rows has nothing to clear
    shared.piece_count = 0;
    constexpr int kWarps = 4 * T::kConsumers;
    shared.q_full.init(1 + (T::kScalesAhead ? 1 : T::kFactorsFollow ? T::kFactorWarps : 0));
    shared.q_empty.init(T::kRowParts);
    for (int s = 0; s < T::kStages; ++s) {
      shared.k_full[s].init(1);
      shared.v_full[s].init(T::kTurnsAhead ? T::kTurners : 1);
      if constexpr (T::kTurnsAhead) shared.rows_of_v.full[s].init(1);
      shared.k_empty[s].init(kWarps);
      shared.v_empty[s].init(kWarps);
    }
    if constexpr (T::kClearsAhead) shared.landed.full.init(1);
    for (int s = 0; s < T::kFactorStages; ++s) shared.factors_full[s].init(T::kFactorWarps);
    ptx::fence_mbarrier_init();
  }
  // Loops of known lengths: the others would be most of what a block does before it reads its share of the plan.
  constexpr unsigned kClears = sizeof(shared.q) / 16, kFactors = 64 * T::kRowParts;
#pragma unroll
  for (unsigned first = 0; first < kClears; first += T::kThreads) {
    const unsigned i = first + threadIdx.x;
    if (i < kClears) reinterpret_cast<uint4*>(shared.q)[i] = make_uint4(0, 0, 0, 0);
  }
#pragma unroll
  for (unsigned first = 0; first < kFactors; first += T::kThreads) {
    const unsigned i = first + threadIdx.x;
    if (i < kFactors) shared.rows[i / 64].factor[i % 64] = 1.0f;
  }
  ptx::fence_proxy_async();
  __syncthreads();
  ptx::griddepcontrol_wait();  // so far nothing was read that kernels before this one may have written
  if (warpgroup == T::kConsumers) {
    if constexpr (T::kExchangesRegisters) ptx::warpgroup_reg_dealloc<T::kProducerRegisters>();
    const int warp = threadIdx.x / 32 % 4;
    if (T::kTurnsAhead && warp >= T::kFirstTurner && warp < T::kFirstTurner + T::kTurners) {
      if constexpr (T::kTurnsAhead) turn_values(shared);
    } else if (warp == 0) {
      fetch<T, true, !T::kValuesApart>(p, shared, k_map, v_map);
    } else if (warp == 3) {
      if constexpr (T::kValuesApart) fetch<T, false, true>(p, shared, k_map, v_map);
      if constexpr (T::kWorksApart) fetch_works<T>(p, shared);
    } else if constexpr (T::kTokenScales) {
      fetch_factors<T>(p, shared);
    } else if constexpr (T::kScalesAhead && !T::kWorksApart) {
      if (warp == 1) fetch_scales<T>(p, shared);
    }
  } else if constexpr (T::kFewRows > 0) {
    if constexpr (T::kExchangesRegisters) ptx::warpgroup_reg_alloc<T::kConsumerRegisters>();
    FewRows<T>(p, shared).run();
  } else {
    ptx::warpgroup_reg_alloc<T::kConsumerRegisters>();
    Consumer<T>(p, shared, warpgroup).run();
  }
}

}  // namespace greenfast::serving

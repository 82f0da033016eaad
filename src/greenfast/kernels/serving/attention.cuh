// Attention over a paged FP8 cache for Hopper (sm_90a). One arithmetic for prefill, chunked prefill and decoding.
//
// A producer warpgroup loads pages of K and V. Each consumer warpgroup has 64 rows of a row tile (plan.cuh); with
// kWarpgroupsN = 2, two share the rows and split the columns of O. Q is quantized when it is read, with a scale per
// row. S = Q K^T and P V are wgmma on E4M3. P V of a tile overlaps with the softmax of the next (FlashAttention-3, Shah
// et al., 2024). O of a chunk stays in the wgmma accumulators; chunks are merged in fp32.
//
// Pages of K are row-major. Pages of V are grouped: for each 16 keys a matrix (head_dim, 16), V transposed, with its
// keys in the register order of the S accumulators (KEY_ORDER in attention/config.py). Or they are row-major: producer
// warps then transpose them in shared memory. decode_swap_ab.cuh reads row-major V without a transpose.
//
// NaN in K, or in a token scale, makes NaN all rows that attend to the key. NaN in V makes NaN its column in all rows
// of the row tile if one of them attends to its key, because 0 times NaN is NaN. This includes earlier query tokens,
// but no other sequence or KV head.
//
// Reading order: traits.cuh (configuration, shared memory), load.cuh (producer), v_stage.cuh and quantize_q.cuh (V and
// Q as operands), softmax.cuh, merge.cuh and output.cuh (from chunks to O), consumer.cuh (main loop),
// decode_swap_ab.cuh (main loop for decoding). This file is the kernel's entry.
#pragma once

#include "ptx/bulk.cuh"
#include "ptx/griddepcontrol.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"
#include "serving/consumer.cuh"
#include "serving/decode_swap_ab.cuh"
#include "serving/load.cuh"
#include "serving/traits.cuh"

namespace greenfast::serving {

// Prefetches the tensor maps, the block's work range and the block tables. Called by the 128 producer threads of each
// block; each block prefetches another part of the tables.
template <class T>
__device__ __forceinline__ void prefetch_metadata(const AttentionParams& p, const ptx::TensorMap& k_map,
                                                  const ptx::TensorMap& v_map) {
  if (threadIdx.x % 128 == 0) {
    ptx::prefetch_map(k_map);
    if constexpr (T::kRowMajorV) ptx::prefetch_map(v_map);
    ptx::prefetch_l2(plan_of(p).work_range(blockIdx.x));
  }
  const long long entries = (p.batch.sequences - 1LL) * p.table_row + p.table_entries;
  const long long entry = (blockIdx.x * 128LL + threadIdx.x % 128) * 32;  // one cache line
  if (entry < entries) ptx::prefetch_l2(p.block_table + entry);
}

// Grid: kBlocksPerSm blocks per multiprocessor. Block: 128 threads per consumer warpgroup and 128 for the producer.
// v_map: tensor map of V if it is row-major, else unused.
template <class Cfg>
__device__ __forceinline__ void attention(const AttentionParams& p, const ptx::TensorMap& k_map,
                                          const ptx::TensorMap& v_map) {
  using T = Traits<Cfg>;
  extern __shared__ __align__(1024) unsigned char smem[];
  Storage<T>& shared = *reinterpret_cast<Storage<T>*>(smem);
  static_assert(sizeof(Storage<T>) == Cfg::kSmemBytes, "the plan of shared memory in Python differs");
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);  // makes it uniform for the compiler
  if (warpgroup == T::kConsumers) prefetch_metadata<T>(p, k_map, v_map);
  if (threadIdx.x == 64) {  // a thread of a warp that has nothing to clear below if kDecodeRows > 0
    shared.split_count = 0;
    constexpr int kWarps = 4 * T::kConsumers;
    shared.q_full.init(1 + (T::kPrefetchScales ? 1 : T::kScaleWarpFollows ? T::kScaleWarps : 0));
    shared.q_empty.init(T::kWarpgroupsM);
    for (int s = 0; s < T::kStages; ++s) {
      shared.k_full[s].init(1);
      shared.v_full[s].init(T::kProducerTransposesV ? T::kNumTransposeWarps : 1);
      if constexpr (T::kProducerTransposesV) shared.row_major_v.full[s].init(1);
      shared.k_empty[s].init(kWarps);
      shared.v_empty[s].init(kWarps);
    }
    if constexpr (T::kProducerZeroFills) shared.loaded_v.full.init(1);
    for (int s = 0; s < T::kScaleStages; ++s) shared.scales_full[s].init(T::kScaleWarps);
    ptx::fence_mbarrier_init();
  }
  // Constant trip counts: otherwise these loops would take most of the prologue.
  constexpr unsigned kClears = sizeof(shared.q) / 16, kFactors = 64 * T::kWarpgroupsM;
#pragma unroll
  for (unsigned first = 0; first < kClears; first += T::kThreads) {
    const unsigned i = first + threadIdx.x;
    if (i < kClears) reinterpret_cast<uint4*>(shared.q)[i] = make_uint4(0, 0, 0, 0);
  }
#pragma unroll
  for (unsigned first = 0; first < kFactors; first += T::kThreads) {
    const unsigned i = first + threadIdx.x;
    if (i < kFactors) shared.rows[i / 64].scale_log2[i % 64] = 1.0f;
  }
  ptx::fence_proxy_async();
  __syncthreads();
  ptx::griddepcontrol_wait();  // nothing above reads the output of earlier kernels
  if (warpgroup == T::kConsumers) {
    if constexpr (T::kReallocRegisters) ptx::warpgroup_reg_dealloc<T::kProducerRegisters>();
    const int warp = threadIdx.x / 32 % 4;
    if (T::kProducerTransposesV && warp >= T::kFirstTransposeWarp &&
        warp < T::kFirstTransposeWarp + T::kNumTransposeWarps) {
      if constexpr (T::kProducerTransposesV) transpose_v_loop(shared);
    } else if (warp == 0) {
      produce<T, true, !T::kSeparateVWarp>(p, shared, k_map, v_map);
    } else if (warp == 3) {
      if constexpr (T::kSeparateVWarp) produce<T, false, true>(p, shared, k_map, v_map);
      if constexpr (T::kSchedulerWarp) scheduler_loop<T>(p, shared);
    } else if constexpr (T::kTokenScales) {
      token_scale_loop<T>(p, shared);
    } else if constexpr (T::kPrefetchScales && !T::kSchedulerWarp) {
      if (warp == 1) head_scale_loop<T>(p, shared);
    }
  } else if constexpr (T::kSwapAB) {
    if constexpr (T::kReallocRegisters) ptx::warpgroup_reg_alloc<T::kConsumerRegisters>();
    DecodeSwapAB<T>(p, shared).run();
  } else {
    ptx::warpgroup_reg_alloc<T::kConsumerRegisters>();
    Consumer<T>(p, shared, warpgroup).run();
  }
}

}  // namespace greenfast::serving

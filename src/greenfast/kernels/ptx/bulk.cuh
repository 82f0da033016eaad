// Copies of contiguous bytes from global to shared memory by the copy engine (PTX ISA, "cp.async.bulk"; sm_90 and up).
#pragma once

#include "ptx/cache_hint.cuh"
#include "ptx/mbarrier.cuh"

namespace greenfast::ptx {

// One thread copies `bytes`, a multiple of 16, and adds them to the barrier; both addresses are multiples of 16.
__device__ __forceinline__ void bulk_load(void* smem_dst, const void* src, unsigned bytes, Mbarrier& full) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   shared_address(smem_dst)),
               "l"(src), "r"(bytes), "r"(shared_address(&full.word))
               : "memory");
}

__device__ __forceinline__ void bulk_load(void* smem_dst, const void* src, unsigned bytes, Mbarrier& full,
                                          CacheHint hint) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(
          shared_address(smem_dst)),
      "l"(src), "r"(bytes), "r"(shared_address(&full.word)), "l"(hint.policy)
      : "memory");
}

// Brings a line into L2, where all multiprocessors meet: it may be one that is still written.
__device__ __forceinline__ void prefetch_l2(const void* address) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
}

// The same for bytes of global memory, a multiple of 16 as their address is.
__device__ __forceinline__ void bulk_prefetch(const void* from, unsigned bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
}

}  // namespace greenfast::ptx

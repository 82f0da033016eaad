// Bulk copies of contiguous bytes between global and shared memory (PTX ISA, "cp.async.bulk"; sm_90 and up).
#pragma once

#include "ptx/cache_hint.cuh"
#include "ptx/mbarrier.cuh"

namespace greenfast::ptx {

// Copies `bytes`, a multiple of 16, issued by one thread; completes on the mbarrier. Both addresses are multiples of
// 16.
__device__ __forceinline__ void bulk_load(void* smem_dst, const void* src, unsigned bytes, Mbarrier& full) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   shared_address(smem_dst)),
               "l"(src), "r"(bytes), "r"(shared_address(&full.word))
               : "memory");
}

__device__ __forceinline__ void bulk_load(void* smem_dst, const void* src, unsigned bytes, Mbarrier& full,
                                          CacheHint hint) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::
          "r"(shared_address(smem_dst)),
      "l"(src), "r"(bytes), "r"(shared_address(&full.word)), "l"(hint.policy)
      : "memory");
}

// Copies `bytes` of shared memory, a multiple of 16, in a bulk group of the thread.
__device__ __forceinline__ void bulk_store(void* dst, const void* smem_src, unsigned bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(dst), "r"(shared_address(smem_src)),
               "r"(bytes)
               : "memory");
}

// Ends a bulk group of the thread.
__device__ __forceinline__ void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Waits until the thread's bulk groups have read shared memory.
__device__ __forceinline__ void bulk_wait_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }

// Waits until the thread's bulk groups are complete.
__device__ __forceinline__ void bulk_wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

// Prefetches a cache line to L2. Other blocks may still write it: L2 is coherent.
__device__ __forceinline__ void prefetch_l2(const void* address) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
}

// Prefetches `bytes` to L2; bytes and address are multiples of 16.
__device__ __forceinline__ void bulk_prefetch(const void* from, unsigned bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
}

}  // namespace greenfast::ptx

// Asynchronous copies from global to shared memory (PTX ISA, "cp.async"; sm_80 and up).
#pragma once

namespace greenfast::ptx {

// Writes 16 bytes: the first `valid_bytes` (0 or 16) from `src`, the rest zero. Both addresses must be 16-byte aligned.
// `src` is not read if valid_bytes is 0.
__device__ __forceinline__ void cp_async_16(void* smem_dst, const void* src, int valid_bytes) {
  const unsigned dst = static_cast<unsigned>(__cvta_generic_to_shared(smem_dst));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(dst), "l"(src), "r"(valid_bytes) : "memory");
}

// Copies 4 bytes, by way of L1.
__device__ __forceinline__ void cp_async_4(void* smem_dst, const void* src) {
  const unsigned dst = static_cast<unsigned>(__cvta_generic_to_shared(smem_dst));
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(dst), "l"(src) : "memory");
}

__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most the newest `kPending` groups of this thread are in flight.
template <int kPending>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace greenfast::ptx

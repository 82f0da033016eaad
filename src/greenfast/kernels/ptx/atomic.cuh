// Counters in global memory for synchronization between blocks (PTX ISA, "red", "ld"; sm_70 and up).
#pragma once

namespace greenfast::ptx {

// Adds with release semantics: writes ordered before it are visible to a thread after its load_acquire reads the sum.
__device__ __forceinline__ void add_release(unsigned* counter, unsigned x) {
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(counter), "r"(x) : "memory");
}

__device__ __forceinline__ unsigned load_acquire(const unsigned* counter) {
  unsigned x;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(x) : "l"(counter) : "memory");
  return x;
}

// Adds 1; wraps to 0 if the counter is `last`.
__device__ __forceinline__ void increment(unsigned* counter, unsigned last) {
  asm volatile("red.relaxed.gpu.global.inc.u32 [%0], %1;" ::"l"(counter), "r"(last) : "memory");
}

}  // namespace greenfast::ptx

// Counters in global memory by which blocks tell each other what is done (PTX ISA, "red", "ld"; sm_70 and up).
#pragma once

namespace greenfast::ptx {

// What this thread knows to be written by then is there for those who find the sum by load_acquire.
__device__ __forceinline__ void add_release(unsigned* counter, unsigned x) {
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(counter), "r"(x) : "memory");
}

__device__ __forceinline__ unsigned load_acquire(const unsigned* counter) {
  unsigned x;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(x) : "l"(counter) : "memory");
  return x;
}

// Adds 1, or makes a counter 0 that is `last`.
__device__ __forceinline__ void increment(unsigned* counter, unsigned last) {
  asm volatile("red.relaxed.gpu.global.inc.u32 [%0], %1;" ::"l"(counter), "r"(last) : "memory");
}

}  // namespace greenfast::ptx

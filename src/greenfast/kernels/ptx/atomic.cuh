// Counters in global memory by which blocks tell each other what is done (PTX ISA, "red", "ld", "st"; sm_70 and up).
#pragma once

namespace greenfast::ptx {

// What this thread knows to be written by then is there for those who find the sum.
__device__ __forceinline__ void add_release(int* counter, int x) {
  asm volatile("red.release.gpu.global.add.s32 [%0], %1;" ::"l"(counter), "r"(x) : "memory");
}

__device__ __forceinline__ int load_acquire(const int* counter) {
  int x;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(x) : "l"(counter) : "memory");
  return x;
}

__device__ __forceinline__ void store_relaxed(int* counter, int x) {
  asm volatile("st.relaxed.gpu.global.s32 [%0], %1;" ::"l"(counter), "r"(x) : "memory");
}

}  // namespace greenfast::ptx

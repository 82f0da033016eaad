// Named barriers between warps of a block (PTX ISA, "bar").
#pragma once

namespace greenfast::ptx {

// Waits until `threads` threads have arrived, by barrier_sync or barrier_arrive.
__device__ __forceinline__ void barrier_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

__device__ __forceinline__ void barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Waits like barrier_sync, and returns whether `vote` is true in all `threads` threads.
__device__ __forceinline__ bool barrier_all(int id, int threads, bool vote) {
  int all;
  asm volatile(
      "{\n"
      ".reg .pred p, q;\n"
      "setp.ne.s32 p, %3, 0;\n"
      "barrier.cta.red.and.pred q, %1, %2, p;\n"
      "selp.s32 %0, 1, 0, q;\n"
      "}"
      : "=r"(all)
      : "r"(id), "r"(threads), "r"(static_cast<int>(vote))
      : "memory");
  return __shfl_sync(0xffffffffu, all, 0) != 0;  // makes it uniform for the compiler
}

}  // namespace greenfast::ptx

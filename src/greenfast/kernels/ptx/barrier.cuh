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

}  // namespace greenfast::ptx

// Named barriers among warps of a block (PTX ISA, "bar").
#pragma once

namespace greenfast::ptx {

// Waits at a named barrier until `threads` threads have come to it, by sync or by arrive.
__device__ __forceinline__ void barrier_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

__device__ __forceinline__ void barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

}  // namespace greenfast::ptx

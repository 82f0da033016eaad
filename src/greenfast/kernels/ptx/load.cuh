// Loads (PTX ISA, "ld").
#pragma once

#include "ptx/cache_hint.cuh"
#include "ptx/mbarrier.cuh"

namespace greenfast::ptx {

// Loads 16 bytes, every time. Equal ordinary loads are merged to one load and register copies.
__device__ __forceinline__ void load_shared_again(int (&x)[4], const int (&from)[4]) {
  asm volatile("ld.volatile.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(shared_address(from)));
}

// Loads from global memory without allocation in L1, for data that this multiprocessor reads once.
__device__ __forceinline__ float load_once(const float* address, CacheHint hint) {
  float x;
  asm volatile("ld.global.L1::no_allocate.L2::cache_hint.f32 %0, [%1], %2;" : "=f"(x) : "l"(address), "l"(hint.policy));
  return x;
}

}  // namespace greenfast::ptx

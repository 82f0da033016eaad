// Loads from shared memory (PTX ISA, "ld").
#pragma once

#include "ptx/mbarrier.cuh"

namespace greenfast::ptx {

// 16 bytes, anew each time: of equal ordinary loads the compiler makes one, and copies its registers.
__device__ __forceinline__ void load_shared_again(int (&x)[4], const int (&from)[4]) {
  asm volatile("ld.volatile.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(shared_address(from)));
}

}  // namespace greenfast::ptx

// Stores to global memory (PTX ISA, "st").
#pragma once

#include "ptx/cache_hint.cuh"

namespace greenfast::ptx {

// Stores 16 bytes at once. The compiler may split an ordinary uint4 store into four if its registers are not adjacent.
__device__ __forceinline__ void store_16(void* address, const unsigned (&x)[4]) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(address), "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3])
               : "memory");
}

// The same with a predicate, branch-free.
__device__ __forceinline__ void store_16_if(bool condition, void* address, const unsigned (&x)[4]) {
  asm volatile(
      "{\n\t.reg .pred p;\n\tsetp.ne.u32 p, %5, 0;\n\t@p st.global.v4.b32 [%0], {%1, %2, %3, %4};\n\t}" ::"l"(address),
      "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]), "r"(static_cast<unsigned>(condition))
      : "memory");
}

// Stores 8 bytes with a predicate, branch-free.
__device__ __forceinline__ void store_8_if(bool condition, void* address, uint2 x) {
  asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.u32 p, %3, 0;\n\t@p st.global.v2.b32 [%0], {%1, %2};\n\t}" ::"l"(address),
               "r"(x.x), "r"(x.y), "r"(static_cast<unsigned>(condition))
               : "memory");
}

__device__ __forceinline__ void store(float* address, float x, CacheHint hint) {
  asm volatile("st.global.L2::cache_hint.f32 [%0], %1, %2;" ::"l"(address), "f"(x), "l"(hint.policy) : "memory");
}

}  // namespace greenfast::ptx

// Stores to global memory (PTX ISA, "st").
#pragma once

namespace greenfast::ptx {

// 16 bytes at once. Of an ordinary uint4 store the compiler may make four of 4 bytes, where its registers lie apart.
__device__ __forceinline__ void store_16(void* address, const unsigned (&x)[4]) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(address), "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3])
               : "memory");
}

}  // namespace greenfast::ptx

// Vector accesses and byte permutations.
#pragma once

namespace greenfast {

// kElements values as one aligned access.
template <class T, int kElements>
struct alignas(sizeof(T) * kElements) Pack {
  T values[kElements];
};

// Transposes a 4x4 byte matrix: byte i of x[k] becomes byte k of y[i].
__device__ __forceinline__ void transpose_bytes(const unsigned (&x)[4], unsigned (&y)[4]) {
  const unsigned low01 = __byte_perm(x[0], x[1], 0x5140), high01 = __byte_perm(x[0], x[1], 0x7362);
  const unsigned low23 = __byte_perm(x[2], x[3], 0x5140), high23 = __byte_perm(x[2], x[3], 0x7362);
  y[0] = __byte_perm(low01, low23, 0x5410);
  y[1] = __byte_perm(low01, low23, 0x7632);
  y[2] = __byte_perm(high01, high23, 0x5410);
  y[3] = __byte_perm(high01, high23, 0x7632);
}

}  // namespace greenfast

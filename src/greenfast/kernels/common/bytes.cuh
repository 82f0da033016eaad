// Bytes moved together, and between words.
#pragma once

namespace greenfast {

// kElements halves, or as many code bytes, as one aligned access.
template <class T, int kElements>
struct alignas(sizeof(T) * kElements) Pack {
  T values[kElements];
};

// Bytes i of four words become word i of four: x[k] byte i to y[i] byte k.
__device__ __forceinline__ void transpose_bytes(const unsigned (&x)[4], unsigned (&y)[4]) {
  const unsigned low01 = __byte_perm(x[0], x[1], 0x5140), high01 = __byte_perm(x[0], x[1], 0x7362);
  const unsigned low23 = __byte_perm(x[2], x[3], 0x5140), high23 = __byte_perm(x[2], x[3], 0x7362);
  y[0] = __byte_perm(low01, low23, 0x5410);
  y[1] = __byte_perm(low01, low23, 0x7632);
  y[2] = __byte_perm(high01, high23, 0x5410);
  y[3] = __byte_perm(high01, high23, 0x7632);
}

}  // namespace greenfast

// Transposes row-major V, (pages, page_size, kv_heads, head_dim), in shared memory.
//
// ldmatrix handles 16-bit elements, so .trans gives a lane two columns of two keys per register. Of keys 0..7 and 8..15
// of sixteen, lane 4 r + q receives keys 2 q, 2 q + 1, 2 q + 8 and 2 q + 9 of columns 2 r and 2 r + 1: one word of
// grouped V per column. FlashAttention-3 (Shah et al., 2024) transposes with ldmatrix too.
#pragma once

#include "ptx/mma.cuh"

namespace greenfast::serving {

// __byte_perm selectors of the even and odd column of such a pair of registers.
constexpr unsigned kEvenColumn = 0x6420, kOddColumn = 0x7531;

// Offset of 16-byte chunk `chunk` of a key in a TMA-swizzled panel of kPanel bytes per key.
template <int kPanel>
__device__ __forceinline__ int swizzled(int key, int chunk) {
  const int swizzle = kPanel == 128 ? key % 8 : key / 2 % 4;
  return key * kPanel + (chunk ^ swizzle) * 16;
}

// Transposes 16 keys of kPanel columns in place, to a matrix (kPanel, 16). Called by one warp.
//
// A register's column is 2 r for the lower half of the lanes and 2 r + 1 for the upper half, or the reverse, so that
// the eight rows of a stored tile have no bank conflicts.
template <int kPanel>
__device__ __forceinline__ void transpose_rows(unsigned char* rows) {
  constexpr int kPairs = kPanel / 32;  // pairs of tiles, 16 columns each
  const int lane = threadIdx.x % 32, row = lane % 8;
  const unsigned char* const src = rows + swizzled<kPanel>(lane % 16, lane / 16);
  const unsigned first = lane < 16 ? kEvenColumn : kOddColumn, second = first ^ (kEvenColumn ^ kOddColumn);
  unsigned x[kPairs][4];
#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
    ptx::ldmatrix_x4_trans(x[i], rows + ((src - rows) ^ i * 32));
  }
  __syncwarp();
  unsigned char* const dst = rows + (lane / 16 * 16 + 2 * row + (row / 4 ^ lane / 8 % 2)) * 16;
#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
    const unsigned y[4] = {__byte_perm(x[i][0], x[i][1], first), __byte_perm(x[i][0], x[i][1], second),
                           __byte_perm(x[i][2], x[i][3], first), __byte_perm(x[i][2], x[i][3], second)};
    ptx::stmatrix_x4(dst + i * 32 * 16, y);
  }
}

}  // namespace greenfast::serving

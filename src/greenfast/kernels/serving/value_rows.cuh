// V as its rows lie in a cache of others, (pages, page_size, kv_heads, head_dim): turned where it is read.
//
// ldmatrix takes 16-bit elements, so its transposed tiles hold two columns of two keys in a register. Of keys 0..7 and
// 8..15 of sixteen, lane 4 r + q then has keys 2 q, 2 q + 1, 2 q + 8 and 2 q + 9 of columns 2 r and 2 r + 1: of each a
// word of V in groups. FlashAttention-3 (Shah et al., 2024) transposes with ldmatrix too.
#pragma once

#include "ptx/mma.cuh"

namespace greenfast::serving {

// Bytes of one column of such a pair of tiles; the other column has the other selector.
constexpr unsigned kEvenColumn = 0x6420, kOddColumn = 0x7531;

// Where the copy engine put the 16 bytes `chunk` of a key, in panels of kPanel bytes whose keys follow each other.
template <int kPanel>
__device__ __forceinline__ int swizzled(int key, int chunk) {
  const int turn = kPanel == 128 ? key % 8 : key / 2 % 4;
  return key * kPanel + (chunk ^ turn) * 16;
}

// By a warp: rows of 16 keys and kPanel columns become a matrix (kPanel, 16) in the same memory.
//
// A register's column is 2 r for the lower half of the lanes and 2 r + 1 for the upper, or the other way around: so
// the eight rows of a stored tile lie in all banks.
template <int kPanel>
__device__ __forceinline__ void turn_rows(unsigned char* rows) {
  constexpr int kPairs = kPanel / 32;  // of 16 columns
  const int lane = threadIdx.x % 32, row = lane % 8;
  const unsigned char* const from = rows + swizzled<kPanel>(lane % 16, lane / 16);
  const unsigned first = lane < 16 ? kEvenColumn : kOddColumn, second = first ^ (kEvenColumn ^ kOddColumn);
  unsigned x[kPairs][4];
#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
    ptx::ldmatrix_x4_trans(x[i], rows + ((from - rows) ^ i * 32));
  }
  __syncwarp();
  unsigned char* const to = rows + (lane / 16 * 16 + 2 * row + (row / 4 ^ lane / 8 % 2)) * 16;
#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
    const unsigned y[4] = {__byte_perm(x[i][0], x[i][1], first), __byte_perm(x[i][0], x[i][1], second),
                           __byte_perm(x[i][2], x[i][3], first), __byte_perm(x[i][2], x[i][3], second)};
    ptx::stmatrix_x4(to + i * 32 * 16, y);
  }
}

}  // namespace greenfast::serving

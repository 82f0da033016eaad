// Tiles of half rows in shared memory, and the two ways to load K and V into them.
#pragma once

#include "common/formats.cuh"
#include "ptx/cp_async.cuh"

namespace greenfast {

// Rows of kCols halves, padded by 16 bytes: eight rows at one column are then in different groups of four banks, so 8x8
// fragment loads have no bank conflicts.
template <int kCols>
struct PaddedLayout {
  static constexpr int kStride = kCols + 8;
  static __device__ __forceinline__ int offset(int row, int col) { return row * kStride + col; }
};

// Rows of kCols halves with 16-byte chunks permuted by row (USE_XOR_SWIZZLE): no bank conflicts and no padding, but
// only for loads that address each row separately (ldmatrix, not WMMA).
template <int kCols>
struct XorSwizzledLayout {
  static_assert(kCols % 64 == 0, "the swizzle permutes eight 16-byte chunks");
  static constexpr int kStride = kCols;
  static __device__ __forceinline__ int offset(int row, int col) {
    return row * kStride + ((((col >> 3) ^ (row & 7)) << 3) | (col & 7));
  }
};

// Divides a tile of kRows x kCols 8-bit values into 16-byte chunks; chunk i belongs to thread i % kThreads.
template <int kRows, int kCols, int kThreads>
struct ChunkMap {
  static constexpr int kChunksPerRow = kCols / 16;
  static constexpr int kChunksPerThread = kRows * kChunksPerRow / kThreads;
  static_assert(kChunksPerThread * kThreads == kRows * kChunksPerRow, "the chunks must divide among the threads");

  static __device__ __forceinline__ int chunk(int i) { return static_cast<int>(threadIdx.x) + i * kThreads; }
  static __device__ __forceinline__ int row(int i) { return chunk(i) / kChunksPerRow; }
  static __device__ __forceinline__ int col(int i) { return chunk(i) % kChunksPerRow * 16; }
};

// Loads a tile directly from global memory and dequantizes it. Rows from `valid_rows` on are zeros and not read.
template <class Map, class Layout, class Dequantizer>
__device__ __forceinline__ void load_tile_direct(const Dequantizer& dequantizer, const unsigned char* src, int cols,
                                                 int valid_rows, half* tile) {
  uint4 codes[Map::kChunksPerThread];
#pragma unroll
  for (int i = 0; i < Map::kChunksPerThread; ++i) {
    codes[i] = make_uint4(0, 0, 0, 0);
    if (Map::row(i) < valid_rows) {
      codes[i] = __ldg(reinterpret_cast<const uint4*>(src + static_cast<size_t>(Map::row(i)) * cols + Map::col(i)));
    }
  }
#pragma unroll
  for (int i = 0; i < Map::kChunksPerThread; ++i) {
    dequantize_16(dequantizer, codes[i], tile + Layout::offset(Map::row(i), Map::col(i)),
                  tile + Layout::offset(Map::row(i), Map::col(i) + 8));
  }
}

// Starts the cp.async of a quantized tile to a stage. Each thread copies the chunks that it later dequantizes, so its
// own cp.async wait is the only synchronization. Rows from `valid_rows` on are zero-filled.
template <class Map>
__device__ __forceinline__ void prefetch_tile(const unsigned char* src, int cols, int valid_rows,
                                              unsigned char* stage) {
#pragma unroll
  for (int i = 0; i < Map::kChunksPerThread; ++i) {
    const bool valid = Map::row(i) < valid_rows;
    const size_t offset = valid ? static_cast<size_t>(Map::row(i)) * cols + Map::col(i) : 0;
    ptx::cp_async_16(stage + Map::chunk(i) * 16, src + offset, valid ? 16 : 0);
  }
}

template <class Map, class Layout, class Dequantizer>
__device__ __forceinline__ void dequantize_tile(const Dequantizer& dequantizer, const unsigned char* stage,
                                                half* tile) {
#pragma unroll
  for (int i = 0; i < Map::kChunksPerThread; ++i) {
    const uint4 codes = *reinterpret_cast<const uint4*>(stage + Map::chunk(i) * 16);
    dequantize_16(dequantizer, codes, tile + Layout::offset(Map::row(i), Map::col(i)),
                  tile + Layout::offset(Map::row(i), Map::col(i) + 8));
  }
}

}  // namespace greenfast

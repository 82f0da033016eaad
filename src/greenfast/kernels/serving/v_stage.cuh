// A tile of V in its stage: the wgmma descriptor, the transpose of row-major V, and zero-fill of keys that no row
// attends to.
#pragma once

#include "attention/sm90/traits.cuh"
#include "ptx/barrier.cuh"
#include "ptx/mbarrier.cuh"
#include "serving/traits.cuh"
#include "serving/transpose_v.cuh"

namespace greenfast::serving {

// K-major wgmma descriptor of V: core matrices of 8 columns by 16 keys (128 bytes), no swizzle.
template <class T>
struct VOperand {
  static constexpr unsigned kKeysStep = T::kGroupBytes / 16, kColumnsStep = 128 / 16;
  unsigned low;
  __device__ explicit VOperand(const void* smem) : low(ptx::shared_address(smem) >> 4 | kKeysStep << 16) {}
  __device__ __forceinline__ unsigned long long at(unsigned bytes) const {
    return static_cast<unsigned long long>(kColumnsStep) << 32 | (low + bytes / 16);
  }
};

// Transposes a stage of row-major V in place. Called by kWarps warps; `warp` is the caller's index.
template <class T, int kWarps>
__device__ __forceinline__ void transpose_stage(unsigned char* stage, int warp) {
  constexpr int kParts = kBlockN / 16 * T::kPanels;
#pragma unroll 1
  for (int part = warp; part < kParts; part += kWarps) transpose_rows<T::kPanel>(stage + part * 16 * T::kPanel);
  ptx::fence_proxy_async();
}

// A byte mask for a group of 16 keys of V, in KEY_ORDER: 0xff for keys keep_begin .. keep_end - 1. key: the first key
// of the group.
__device__ __forceinline__ uint4 key_byte_mask(int key, int keep_begin, int keep_end) {
  constexpr int kOrder[16] = {0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15};
  unsigned mask[4] = {};
#pragma unroll
  for (int j = 0; j < 16; ++j) {
    const int k = key + kOrder[j];
    if (k >= keep_begin && k < keep_end) mask[j / 4] |= 0xffu << j % 4 * 8;
  }
  return make_uint4(mask[0], mask[1], mask[2], mask[3]);
}

// Zero-fills V for the keys out of begin .. end - 1 that are not in keep_begin .. keep_end - 1. The cache may hold
// anything there, and 0 times NaN is NaN. Called by kWarps warps; `warp` is the caller's index.
template <class T, int kWarps>
__device__ __forceinline__ void zero_v_keys(unsigned char* stage, int warp, int begin, int end, int keep_begin,
                                            int keep_end) {
#pragma unroll 1
  for (int key = begin + 16 * warp; key < end; key += 16 * kWarps) {
    if (key >= keep_begin && key + 16 <= keep_end) continue;
    const uint4 mask = key_byte_mask(key, keep_begin, keep_end);
    uint4* const group = reinterpret_cast<uint4*>(stage + key / 16 * T::kGroupBytes);
#pragma unroll 2
    for (int column = threadIdx.x % 32; column < T::kHeadDim; column += 32) {
      const uint4 x = group[column];
      group[column] = make_uint4(x.x & mask.x, x.y & mask.y, x.z & mask.z, x.w & mask.w);
    }
  }
  ptx::fence_proxy_async();
}

// Zero-fills the pages of a tile that are not loaded. Called by the V warp before it starts the copies. page: keys of a
// page. Returns the loaded range, and whether a part of it must be zero-filled after the copies land.
struct ZeroFill {
  int begin, end;  // loaded keys
  bool pending;    // some of them must be zero-filled after the copies land
};
template <class T>
__device__ __forceinline__ ZeroFill zero_unloaded(unsigned char* stage, int page, int keep_begin, int keep_end) {
  const ZeroFill zero_fill{max(keep_begin, 0) & -page, (min(keep_end, kBlockN) + page - 1) & -page,
                           (keep_begin > 0 && keep_begin % page > 0) || (keep_end < kBlockN && keep_end % page > 0)};
  if (keep_begin <= 0 && keep_end >= kBlockN) return zero_fill;
  uint4* const values = reinterpret_cast<uint4*>(stage);  // a group of 16 keys has kHeadDim of them
  const int begin = zero_fill.begin / 16 * T::kHeadDim, end = zero_fill.end / 16 * T::kHeadDim;
#pragma unroll 4
  for (int i = threadIdx.x % 32; i < begin; i += 32) values[i] = make_uint4(0, 0, 0, 0);
#pragma unroll 4
  for (int i = end + threadIdx.x % 32; i < kBlockN / 16 * T::kHeadDim; i += 32) values[i] = make_uint4(0, 0, 0, 0);
  ptx::fence_proxy_async();
  __syncwarp();
  return zero_fill;
}

// Zero-fills the keys of a stage of row-major V that are not in keep_begin .. keep_end - 1. Called by all consumers.
template <class T>
__device__ __forceinline__ void zero_v_rows(unsigned char* stage, int keep_begin, int keep_end) {
  constexpr int kChunks = T::kPanel / 16;
  for (int i = threadIdx.x; i < T::kPanels * kBlockN * kChunks; i += T::kConsumerThreads) {
    const int key = i / kChunks % kBlockN;
    if (key >= keep_begin && key < keep_end) continue;
    reinterpret_cast<uint4*>(stage)[i] = make_uint4(0, 0, 0, 0);
  }
}

}  // namespace greenfast::serving

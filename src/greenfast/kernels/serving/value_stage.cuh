// A tile of V in its stage: an operand of P V, turned where it holds rows, cleared where it holds keys of no row.
#pragma once

#include "attention/sm90/traits.cuh"
#include "ptx/barrier.cuh"
#include "ptx/mbarrier.cuh"
#include "serving/traits.cuh"
#include "serving/value_rows.cuh"

namespace greenfast::serving {

// K-major operand of V in shared memory: matrices of 8 columns by 16 keys of 128 bytes each, without a swizzle.
template <class T>
struct ValueOperand {
  static constexpr unsigned kKeysStep = T::kGroupBytes / 16, kColumnsStep = 128 / 16;
  unsigned low;
  __device__ explicit ValueOperand(const void* smem) : low(ptx::shared_address(smem) >> 4 | kKeysStep << 16) {}
  __device__ __forceinline__ unsigned long long at(unsigned bytes) const {
    return static_cast<unsigned long long>(kColumnsStep) << 32 | (low + bytes / 16);
  }
};

// By a warp of kWarps that do so: turns rows of V in the stage where they lie.
template <class T, int kWarps>
__device__ __forceinline__ void turn_stage(unsigned char* stage, int warp) {
  constexpr int kParts = kTile / 16 * T::kPanels;
#pragma unroll 1
  for (int part = warp; part < kParts; part += kWarps) turn_rows<T::kPanel>(stage + part * 16 * T::kPanel);
  ptx::fence_proxy_async();
}

// Of a group of V's 16 keys from `key` on, the bytes of keys first .. stop - 1, in the order of KEY_ORDER.
__device__ __forceinline__ uint4 bytes_of_keys(int key, int first, int stop) {
  constexpr int kOrder[16] = {0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15};
  unsigned kept[4] = {};
#pragma unroll
  for (int j = 0; j < 16; ++j) {
    const int k = key + kOrder[j];
    if (k >= first && k < stop) kept[j / 4] |= 0xffu << j % 4 * 8;
  }
  return make_uint4(kept[0], kept[1], kept[2], kept[3]);
}

// By a warp of kWarps that do so: of keys begin .. end - 1, clears values of those that no row attends to. A cache holds
// anything behind a sequence, and 0 times NaN is NaN.
template <class T, int kWarps>
__device__ __forceinline__ void clear_values(unsigned char* stage, int warp, int begin, int end, int first, int stop) {
#pragma unroll 1
  for (int key = begin + 16 * warp; key < end; key += 16 * kWarps) {
    if (key >= first && key + 16 <= stop) continue;
    const uint4 kept = bytes_of_keys(key, first, stop);
    uint4* const group = reinterpret_cast<uint4*>(stage + key / 16 * T::kGroupBytes);
#pragma unroll 2
    for (int column = threadIdx.x % 32; column < T::kHeadDim; column += 32) {
      const uint4 x = group[column];
      group[column] = make_uint4(x.x & kept.x, x.y & kept.y, x.z & kept.z, x.w & kept.w);
    }
  }
  ptx::fence_proxy_async();
}

// By the warp that fetches a tile, in pages of `page` keys: clears at first what lies in pages that are not fetched.
struct Cleared {
  int begin, end;  // of the keys that are fetched
  bool later;      // whether some of them are to be cleared once they are there
};
template <class T>
__device__ __forceinline__ Cleared clear_unfetched(unsigned char* stage, int page, int first, int stop) {
  const Cleared cleared{max(first, 0) & -page, (min(stop, kTile) + page - 1) & -page,
                        (first > 0 && first % page > 0) || (stop < kTile && stop % page > 0)};
  if (first <= 0 && stop >= kTile) return cleared;
  uint4* const values = reinterpret_cast<uint4*>(stage);  // a group of 16 keys has as many as columns
  const int begin = cleared.begin / 16 * T::kHeadDim, end = cleared.end / 16 * T::kHeadDim;
#pragma unroll 4
  for (int i = threadIdx.x % 32; i < begin; i += 32) values[i] = make_uint4(0, 0, 0, 0);
#pragma unroll 4
  for (int i = end + threadIdx.x % 32; i < kTile / 16 * T::kHeadDim; i += 32) values[i] = make_uint4(0, 0, 0, 0);
  ptx::fence_proxy_async();
  __syncwarp();
  return cleared;
}

// By all consumers: the same where the stage holds rows.
template <class T>
__device__ __forceinline__ void clear_rows(unsigned char* stage, int first, int stop) {
  constexpr int kChunks = T::kPanel / 16;
  for (int i = threadIdx.x; i < T::kPanels * kTile * kChunks; i += T::kConsumerThreads) {
    const int key = i / kChunks % kTile;
    if (key >= first && key < stop) continue;
    reinterpret_cast<uint4*>(stage)[i] = make_uint4(0, 0, 0, 0);
  }
}

}  // namespace greenfast::serving

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

// Clears values of keys that no row attends to: a cache holds anything behind a sequence, and 0 times NaN is NaN.
template <class T>
__device__ __forceinline__ void clear_values(Storage<T>& shared, const Ring<T::kStages>& ring, int first, int stop) {
  for (int i = threadIdx.x; i < kTile / 16 * T::kHeadDim; i += T::kConsumerThreads) {
    const int group = i / T::kHeadDim, key = group * 16;
    if (key >= first && key + 16 <= stop) continue;
    const uint4 kept = bytes_of_keys(key, first, stop);
    uint4* const at = reinterpret_cast<uint4*>(shared.v[ring.stage][group] + i % T::kHeadDim * 16);
    const uint4 x = *at;
    *at = make_uint4(x.x & kept.x, x.y & kept.y, x.z & kept.z, x.w & kept.w);
  }
  ptx::fence_proxy_async();
  ptx::barrier_sync(Barrier::kConsumers, T::kConsumerThreads);
}

// The same by the warp that fetches a tile, in pages of `page` keys: at first what lies in pages that are not fetched.
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

// Then the others, of keys begin .. end - 1.
template <class T>
__device__ __forceinline__ void clear_values(unsigned char* stage, int begin, int end, int first, int stop) {
#pragma unroll 1
  for (int key = begin; key < end; key += 16) {
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
  __syncwarp();
}

// The same where the stage holds rows.
template <class T>
__device__ __forceinline__ void clear_rows(Storage<T>& shared, const Ring<T::kStages>& ring, int first, int stop) {
  constexpr int kChunks = T::kPanel / 16;
  for (int i = threadIdx.x; i < T::kPanels * kTile * kChunks; i += T::kConsumerThreads) {
    const int key = i / kChunks % kTile;
    if (key >= first && key < stop) continue;
    reinterpret_cast<uint4*>(shared.v[ring.stage])[i] = make_uint4(0, 0, 0, 0);
  }
  ptx::barrier_sync(Barrier::kConsumers, T::kConsumerThreads);
}

}  // namespace greenfast::serving

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

// Clears values of keys that no row attends to: a cache holds anything behind a sequence, and 0 times NaN is NaN.
template <class T>
__device__ __forceinline__ void clear_values(Storage<T>& shared, const Ring<T::kStages>& ring, int first, int stop) {
  constexpr int kOrder[16] = {0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15};
  for (int i = threadIdx.x; i < kTile / 16 * T::kHeadDim; i += T::kConsumerThreads) {
    const int group = i / T::kHeadDim, key = group * 16;
    if (key >= first && key + 16 <= stop) continue;
    unsigned kept[4] = {};
#pragma unroll
    for (int j = 0; j < 16; ++j) {
      const int k = key + kOrder[j];
      if (k >= first && k < stop) kept[j / 4] |= 0xffu << j % 4 * 8;
    }
    uint4* const at = reinterpret_cast<uint4*>(shared.v[ring.stage][group] + i % T::kHeadDim * 16);
    const uint4 x = *at;
    *at = make_uint4(x.x & kept[0], x.y & kept[1], x.z & kept[2], x.w & kept[3]);
  }
  ptx::fence_proxy_async();
  ptx::barrier_sync(Barrier::kConsumers, T::kConsumerThreads);
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

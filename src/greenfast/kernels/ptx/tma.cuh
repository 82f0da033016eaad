// TMA: tensor copies from global to shared memory (PTX ISA, "cp.async.bulk.tensor"; sm_90 and up).
#pragma once

#include "ptx/cache_hint.cuh"
#include "ptx/mbarrier.cuh"

namespace greenfast::ptx {

// CUtensorMap: encoded by the host, passed by value as a __grid_constant__ parameter.
struct alignas(64) TensorMap {
  unsigned char opaque[128];
};

__device__ __forceinline__ void prefetch_map(const TensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// Copies the box at (x, y, z) or (x, y, z, w), x innermost, issued by one thread; completes on the mbarrier. Elements
// out of bounds are zero-filled.
__device__ __forceinline__ void tma_load_3d(void* smem_dst, const TensorMap& map, Mbarrier& full, int x, int y, int z) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], "
      "[%2];" ::"r"(shared_address(smem_dst)),
      "l"(&map), "r"(shared_address(&full.word)), "r"(x), "r"(y), "r"(z)
      : "memory");
}

__device__ __forceinline__ void tma_load_4d(void* smem_dst, const TensorMap& map, Mbarrier& full, int x, int y, int z,
                                            int w) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], "
      "[%2];" ::"r"(shared_address(smem_dst)),
      "l"(&map), "r"(shared_address(&full.word)), "r"(x), "r"(y), "r"(z), "r"(w)
      : "memory");
}

__device__ __forceinline__ void tma_load_4d(void* smem_dst, const TensorMap& map, Mbarrier& full, int x, int y, int z,
                                            int w, CacheHint hint) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(shared_address(smem_dst)),
      "l"(&map), "r"(shared_address(&full.word)), "r"(x), "r"(y), "r"(z), "r"(w), "l"(hint.policy)
      : "memory");
}

// Prefetches the box to L2.
__device__ __forceinline__ void tma_prefetch_4d(const TensorMap& map, int x, int y, int z, int w) {
  asm volatile("cp.async.bulk.prefetch.tensor.4d.L2.global.tile [%0, {%1, %2, %3, %4}];" ::"l"(&map), "r"(x), "r"(y),
               "r"(z), "r"(w)
               : "memory");
}

}  // namespace greenfast::ptx

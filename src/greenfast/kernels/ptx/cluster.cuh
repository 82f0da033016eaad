// Clusters of thread blocks: their barrier, and reads of one block's shared memory by another (PTX ISA,
// "barrier.cluster", "mapa"; sm_90 and up).
#pragma once

#include "mbarrier.cuh"

namespace greenfast::ptx {

// Every thread of the cluster arrives and waits; what they wrote to shared memory before is seen behind it.
__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\n\tbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// The float at the place of `own` in the shared memory of block `rank` of the cluster.
__device__ __forceinline__ float load_from(const float* own, unsigned rank) {
  unsigned address;
  float value;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared_address(own)), "r"(rank));
  asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(value) : "r"(address) : "memory");
  return value;
}

}  // namespace greenfast::ptx

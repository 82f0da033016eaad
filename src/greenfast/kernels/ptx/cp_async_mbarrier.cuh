// mbarriers on which cp.async arrives (PTX ISA, "cp.async.mbarrier.arrive", "mbarrier.test_wait"; sm_80 and up).
#pragma once

#include "ptx/mbarrier.cuh"

namespace greenfast::ptx {

// Arrives (without increasing the expected count) when all earlier cp.async of this thread have landed.
__device__ __forceinline__ void cp_async_arrive(Mbarrier& barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(&barrier.word)) : "memory");
}

// Mbarrier::wait for sm_80 too: before sm_90 there is no suspending try_wait, so threads spin.
__device__ __forceinline__ void mbarrier_wait(Mbarrier& barrier, unsigned parity) {
#if __CUDA_ARCH__ >= 900
  barrier.wait(parity);
#else
  unsigned done;
  do {
    asm volatile(
        "{\n\t.reg .pred done;\n\tmbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2;\n\t"
        "selp.u32 %0, 1, 0, done;\n\t}"
        : "=r"(done)
        : "r"(shared_address(&barrier.word)), "r"(parity)
        : "memory");
  } while (!done);
#endif
}

}  // namespace greenfast::ptx

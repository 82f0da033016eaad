// mbarriers: barriers in shared memory that count arrivals and bytes (PTX ISA, "mbarrier").
#pragma once

namespace greenfast::ptx {

__device__ __forceinline__ unsigned shared_address(const void* p) {
  return static_cast<unsigned>(__cvta_generic_to_shared(p));
}

// A phase completes when `arrivals` threads have arrived and all expected bytes have landed. Phases are identified by
// parity: the first has parity 0. Waiting for parity 1 on a fresh barrier returns at once.
struct Mbarrier {
  unsigned long long word;

  __device__ void init(unsigned arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(&word)), "r"(arrivals) : "memory");
  }

  __device__ __forceinline__ void arrive() {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(&word)) : "memory");
  }

  // Arrives, and adds `bytes` to the transaction count of this phase.
  __device__ __forceinline__ void arrive_expect(unsigned bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(&word)), "r"(bytes)
                 : "memory");
  }

  // Whether the phase of that parity has completed.
  __device__ __forceinline__ bool is_over(unsigned parity) {
    unsigned done;
    asm volatile(
        "{\n\t.reg .pred done;\n\tmbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2;\n\t"
        "selp.u32 %0, 1, 0, done;\n\t}"
        : "=r"(done)
        : "r"(shared_address(&word)), "r"(parity)
        : "memory");
    return done;
  }

  // Waits until the phase of that parity has completed.
  __device__ __forceinline__ void wait(unsigned parity) {
    unsigned done;
    do {
      asm volatile(
          "{\n\t.reg .pred done;\n\tmbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2;\n\t"
          "selp.u32 %0, 1, 0, done;\n\t}"
          : "=r"(done)
          : "r"(shared_address(&word)), "r"(parity)
          : "memory");
    } while (!done);
  }
};

// Makes barrier initialization visible to asynchronous copies.
__device__ __forceinline__ void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Makes this thread's stores to shared memory visible to tensor cores and asynchronous copies.
__device__ __forceinline__ void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

}  // namespace greenfast::ptx

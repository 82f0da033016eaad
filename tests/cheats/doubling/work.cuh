// Work whose absence shows in the time.
#pragma once

// Some 30 us on any recent GPU.
__device__ __forceinline__ void work() {
  const long long start = clock64();
  while (clock64() - start < 50000) {
  }
}

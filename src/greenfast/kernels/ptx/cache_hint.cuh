// L2 eviction policies (PTX ISA, "createpolicy"; sm_80 and up).
#pragma once

namespace greenfast::ptx {

struct CacheHint {
  unsigned long long policy;
};

// For data that is read once: evicted first.
__device__ __forceinline__ CacheHint evict_first() {
  CacheHint hint;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(hint.policy));
  return hint;
}

// For data that others will read soon: evicted last.
__device__ __forceinline__ CacheHint evict_last() {
  CacheHint hint;
  asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(hint.policy));
  return hint;
}

}  // namespace greenfast::ptx

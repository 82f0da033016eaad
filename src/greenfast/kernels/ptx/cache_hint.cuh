// What L2 is to keep, or to give up first (PTX ISA, "createpolicy"; sm_80 and up).
#pragma once

namespace greenfast::ptx {

struct CacheHint {
  unsigned long long policy;
};

// For what is read once: it leaves room for the rest.
__device__ __forceinline__ CacheHint evict_first() {
  CacheHint hint;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(hint.policy));
  return hint;
}

// For what others will read soon: it stays while anything else can be given up.
__device__ __forceinline__ CacheHint evict_last() {
  CacheHint hint;
  asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(hint.policy));
  return hint;
}

}  // namespace greenfast::ptx

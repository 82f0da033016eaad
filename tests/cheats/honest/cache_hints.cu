/* greenfast: {
  "name": "cache_hints", "problem": "doubling",
  "description": "loads and stores with policies, prefetches and hints of the cache",
  "target": "sm_90a",
  "launches": [{"kernel": "doubling", "grid": ["ceildiv(N, 256)"], "block": [256], "args": ["x", "y", "int32(N)"]}]
} */
extern "C" __global__ void doubling(const float* x, float* y, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  unsigned long long policy;
  float v;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  asm volatile("prefetch.global.L2 [%0];" ::"l"(x + i));
  asm volatile("ld.global.nc.L1::no_allocate.L2::cache_hint.f32 %0, [%1], %2;" : "=f"(v) : "l"(x + i), "l"(policy));
  asm volatile("st.global.L2::cache_hint.f32 [%0], %1, %2;" ::"l"(y + i), "f"(2.0f * v), "l"(policy) : "memory");
}

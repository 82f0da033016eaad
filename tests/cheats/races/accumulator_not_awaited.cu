/* greenfast: {
  "name": "accumulator_not_awaited", "problem": "sums",
  "description": "reads an accumulator of wgmma before it waits",
  "target": "sm_90a",
  "launches": [{"kernel": "sums", "grid": ["R"], "block": [128], "args": ["x", "y", "int32(C)"]}]
} */
#include <cuda_bf16.h>
extern "C" __global__ void sums(const float* x, float* y, int c) {
  __shared__ alignas(128) __nv_bfloat16 a[64 * 16], one[8 * 16];
  const int t = threadIdx.x;
  float d[4] = {0, 0, 0, 0};
  auto desc = [](const void* p) { unsigned long long s = (unsigned long long)((unsigned)__cvta_generic_to_shared(p) & 0x3FFFF) >> 4; return s | (8ull << 16) | (16ull << 32); };
  for (int i = t; i < 1024; i += 128) a[i] = __float2bfloat16(0.0f);
  if (t < 128) one[t] = __float2bfloat16(1.0f);
  __syncthreads();
  if (t == 0) for (int i = 0; i < 8; ++i) a[i] = __float2bfloat16(1.0f);
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncthreads();
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
  float got;
  asm volatile("{wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%0,%1,%2,%3}, %5, %6, 1, 1, 1, 0, 0;\nwgmma.commit_group.sync.aligned;\nmul.f32 %4, %0, 0f3F800000;\nwgmma.wait_group.sync.aligned 0;}" : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "=f"(got) : "l"(desc(a)), "l"(desc(one)));
  float s = 0;
  if (t == 0) { for (int i = 0; i < c; ++i) s += x[blockIdx.x * (long long)c + i]; y[blockIdx.x] = s + 0 * (got > 100.0f); }
}

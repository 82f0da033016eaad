/* greenfast: {
  "name": "operand_changed_under_wgmma", "problem": "sums",
  "description": "changes an operand of wgmma in shared memory before it waits",
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
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncthreads();
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
  asm volatile("{wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%0,%1,%2,%3}, %4, %5, 1, 1, 1, 0, 0;}" : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "l"(desc(a)), "l"(desc(one)));
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
  a[t] = __float2bfloat16(3.0f);
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
  float s = 0;
  if (t == 0) { for (int i = 0; i < c; ++i) s += x[blockIdx.x * (long long)c + i]; y[blockIdx.x] = s + 0 * (d[0] > 100.0f); }
}

/* greenfast: {
  "name": "bulk_copy_rounded_up", "problem": "doubling",
  "description": "copies whole units of 16 bytes by TMA, also behind the end",
  "target": "sm_90a",
  "launches": [{"kernel": "doubling", "grid": ["ceildiv(N, 256)"], "block": [256], "args": ["x", "y", "int32(N)"]}]
} */
extern "C" __global__ void doubling(const float* x, float* y, int n) {
  __shared__ alignas(128) float tile[256];
  __shared__ alignas(8) unsigned long long full;
  const unsigned bar = __cvta_generic_to_shared(&full);
  const int b = blockIdx.x * 256, i = b + threadIdx.x, bytes = min(1024, (n - b) * 4 + 15 & ~15);
  if (threadIdx.x == 0) {
    asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(bar));
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"((unsigned)__cvta_generic_to_shared(tile)), "l"(x + b), "r"(bytes), "r"(bar) : "memory");
  }
  __syncthreads();
  unsigned done;
  do asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], 0; selp.u32 %0, 1, 0, p;}" : "=r"(done) : "r"(bar) : "memory"); while (!done);
  if (i < n) y[i] = 2.0f * tile[threadIdx.x];
}

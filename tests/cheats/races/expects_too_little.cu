/* greenfast: {
  "name": "expects_too_little", "problem": "doubling",
  "description": "expects fewer bytes than it copies",
  "target": "sm_90a",
  "launches": [{"kernel": "doubling", "grid": ["ceildiv(N, 256)"], "block": [256], "args": ["x", "y", "int32(N)"]}]
} */
extern "C" __global__ void doubling(const float* x, float* y, int n) {
  __shared__ alignas(128) float stage[256];
  __shared__ alignas(8) unsigned long long ready;
  const int first = blockIdx.x * 256, i = first + threadIdx.x;
  unsigned bar = static_cast<unsigned>(__cvta_generic_to_shared(&ready)),
           at = static_cast<unsigned>(__cvta_generic_to_shared(stage));
  if (first + 256 > n) {
    if (i < n) y[i] = 2.0f * x[i];
    return;
  }
  if (threadIdx.x == 0) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;\nfence.mbarrier_init.release.cluster;" ::"r"(bar) : "memory");
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], 512;" ::"r"(bar) : "memory");
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], 1024, [%2];" ::"r"(at),
                 "l"(x + first), "r"(bar)
                 : "memory");
  }
  __syncthreads();
  unsigned done = 0;
  do
    asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], 0; selp.u32 %0, 1, 0, p;}"
                 : "=r"(done)
                 : "r"(bar)
                 : "memory");
  while (!done);
  y[i] = 2.0f * stage[threadIdx.x];
}

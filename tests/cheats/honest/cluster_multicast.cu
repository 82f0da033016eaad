/* greenfast: {
  "name": "cluster_multicast", "problem": "doubling",
  "description": "halves of a tile by multicast to both blocks of a cluster",
  "target": "sm_90a",
  "launches": [{"kernel": "doubling", "grid": ["2 * ceildiv(N, 256)"], "block": [128], "args": ["x", "y", "int32(N)"]}]
} */
extern "C" __global__ void __cluster_dims__(2, 1, 1) doubling(const float* x, float* y, int n) {
  __shared__ alignas(128) float tile[256];
  __shared__ alignas(8) unsigned long long full;
  auto at = [](const void* p) { return static_cast<unsigned>(__cvta_generic_to_shared(p)); };
  unsigned rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  const int pair = blockIdx.x / 2, b = pair * 256;
  const bool whole = b + 256 <= n;
  if (threadIdx.x == 0) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(at(&full)));
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    if (whole) asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], 1024;" ::"r"(at(&full)) : "memory");
  }
  asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
  if (threadIdx.x == 0 && whole)
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1], 512, [%2], %3;" ::"r"(at(tile + 128 * rank)), "l"(x + b + 128 * rank), "r"(at(&full)), "h"((unsigned short)3) : "memory");
  if (whole) {
    unsigned done;
    do asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], 0; selp.u32 %0, 1, 0, p;}" : "=r"(done) : "r"(at(&full)) : "memory");
    while (!done);
    y[b + 128 * rank + threadIdx.x] = 2.0f * tile[128 * rank + threadIdx.x];
  } else if (b + 128 * rank + threadIdx.x < n) y[b + 128 * rank + threadIdx.x] = 2.0f * x[b + 128 * rank + threadIdx.x];
  asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}

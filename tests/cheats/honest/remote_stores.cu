/* greenfast: {
  "name": "remote_stores", "problem": "doubling",
  "description": "blocks of a cluster hand their values to each other by st.async",
  "target": "sm_90a",
  "launches": [{"kernel": "doubling", "grid": ["2 * ceildiv(N, 512)"], "block": [256], "cluster": [2],
     "args": ["x", "y", "int32(N)"]}]
} */
extern "C" __global__ void doubling(const float* x, float* y, int n) {
  __shared__ alignas(16) float got[256];
  __shared__ alignas(8) unsigned long long ready;
  const unsigned bar = static_cast<unsigned>(__cvta_generic_to_shared(&ready));
  unsigned to = static_cast<unsigned>(__cvta_generic_to_shared(got + threadIdx.x)), there = bar;
  if (threadIdx.x == 0) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;\nfence.mbarrier_init.release.cluster;" ::"r"(bar) : "memory");
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], 1024;" ::"r"(bar) : "memory");
  }
  asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
  const unsigned other = (blockIdx.x ^ 1) % 2;
  asm volatile("mapa.shared::cluster.u32 %0, %0, %1;" : "+r"(to) : "r"(other));
  asm volatile("mapa.shared::cluster.u32 %0, %0, %1;" : "+r"(there) : "r"(other));
  const int mine = blockIdx.x * 256 + threadIdx.x, i = (blockIdx.x ^ 1) * 256 + threadIdx.x;
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %1, [%2];" ::"r"(to),
               "f"(mine < n ? x[mine] : 0.0f), "r"(there)
               : "memory");
  unsigned done;
  do
    asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], 0; selp.u32 %0, 1, 0, p;}"
                 : "=r"(done)
                 : "r"(bar)
                 : "memory");
  while (!done);
  if (i < n) y[i] = 2.0f * got[threadIdx.x];
  asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}

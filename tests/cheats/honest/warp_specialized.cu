/* greenfast: {
  "name": "warp_specialized", "problem": "doubling",
  "description": "a warp copies by TMA through a ring of two stages, four warps double",
  "target": "sm_90a",
  "launches": [{"kernel": "doubling", "grid": [3], "block": [160], "args": ["x", "y", "int32(N)"]}]
} */
extern "C" __global__ void __launch_bounds__(160) doubling(const float* x, float* y, int n) {
  __shared__ alignas(128) float stage[2][128];
  __shared__ alignas(8) unsigned long long full[2], empty[2];
  const int t = threadIdx.x, whole = n / 128;
  auto at = [](const void* p) { return static_cast<unsigned>(__cvta_generic_to_shared(p)); };
  auto wait = [&](unsigned bar, unsigned parity) {
    unsigned done;
    do
      asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
                   : "=r"(done)
                   : "r"(bar), "r"(parity)
                   : "memory");
    while (!done);
  };
  if (t == 0) {
    for (int s = 0; s < 2; ++s) {
      asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(at(full + s)));
      asm volatile("mbarrier.init.shared::cta.b64 [%0], 128;" ::"r"(at(empty + s)));
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  if (t >= 128) {
    if (t == 128) {
      for (int tile = blockIdx.x, k = 0; tile < whole; tile += gridDim.x, ++k) {
        const int s = k % 2;
        if (k >= 2) wait(at(empty + s), (k / 2 + 1) % 2);
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], 512;" ::"r"(at(full + s)) : "memory");
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], 512, [%2];" ::"r"(
                         at(stage[s])),
                     "l"(x + tile * 128), "r"(at(full + s))
                     : "memory");
      }
    }
  } else {
    for (int tile = blockIdx.x, k = 0; tile < whole; tile += gridDim.x, ++k) {
      const int s = k % 2;
      wait(at(full + s), k / 2 % 2);
      y[tile * 128 + t] = 2.0f * stage[s][t];
      asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
      asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(at(empty + s)) : "memory");
    }
    const int i = whole * 128 + t;
    if (blockIdx.x == 0 && i < n) y[i] = 2.0f * x[i];
  }
}

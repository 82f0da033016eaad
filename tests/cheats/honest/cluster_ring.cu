/* greenfast: {
  "name": "cluster_ring", "problem": "doubling",
  "description": "a block feeds another one of its cluster through a ring in that one's shared memory",
  "target": "sm_90a",
  "launches": [{"kernel": "doubling", "grid": [4], "block": [128], "args": ["x", "y", "int32(N)"]}]
} */
__device__ unsigned at(const void* p) { return static_cast<unsigned>(__cvta_generic_to_shared(p)); }
__device__ unsigned there(unsigned p, unsigned rank) { unsigned r; asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(r) : "r"(p), "r"(rank)); return r; }
__device__ void arrive(unsigned bar) { asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(bar) : "memory"); }
__device__ void wait(unsigned bar, unsigned parity) {
  unsigned done;
  do asm volatile("{.reg .pred p; mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}" : "=r"(done) : "r"(bar), "r"(parity) : "memory"); while (!done);
}
extern "C" __global__ void __cluster_dims__(2, 1, 1) doubling(const float* x, float* y, int n) {
  __shared__ float stage[2][128];
  __shared__ unsigned long long full[2], empty[2];
  unsigned rank; asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  const int t = threadIdx.x, tiles = (n + 127) / 128, clusters = gridDim.x / 2;
  if (t == 0) {
    for (int s = 0; s < 2; ++s) {
      asm volatile("mbarrier.init.shared::cta.b64 [%0], 128;" ::"r"(at(full + s)));
      asm volatile("mbarrier.init.shared::cta.b64 [%0], 128;" ::"r"(at(empty + s)));
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
  for (int tile = blockIdx.x / 2, k = 0; tile < tiles; tile += clusters, ++k) {
    const int s = k % 2, i = tile * 128 + t, back = tile * 128 + 127 - t;
    if (rank == 0) {
      if (k >= 2) wait(at(empty + s), (k / 2 + 1) % 2);
      asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(there(at(&stage[s][t]), 1)), "f"(i < n ? x[i] : 0.0f) : "memory");
      arrive(there(at(full + s), 1));
    } else {
      wait(at(full + s), k / 2 % 2);
      if (back < n) y[back] = 2.0f * stage[s][127 - t];
      arrive(there(at(empty + s), 0));
    }
  }
  asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}

/* greenfast: {
  "name": "remote_store_not_awaited", "problem": "doubling",
  "description": "reads what the other block of its cluster stores, between arriving and waiting",
  "target": "sm_90a",
  "launches": [{"kernel": "doubling", "grid": ["2 * ceildiv(N, 512)"], "block": [256], "args": ["x", "y", "int32(N)"]}]
} */
extern "C" __global__ void __cluster_dims__(2, 1, 1) doubling(const float* x, float* y, int n) {
  __shared__ float tile[256];
  unsigned rank, there; asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
  const int i = blockIdx.x * 256 + threadIdx.x, j = (blockIdx.x ^ 1) * 256 + threadIdx.x;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"((unsigned)__cvta_generic_to_shared(tile + threadIdx.x)), "r"(rank ^ 1));
  asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(there), "f"(i < n ? x[i] : 0.0f) : "memory");
  asm volatile("barrier.cluster.arrive.aligned;" ::: "memory");
  if (j < n) y[j] = 2.0f * tile[threadIdx.x];
  asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
}

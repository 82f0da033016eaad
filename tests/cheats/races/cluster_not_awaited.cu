/* greenfast: {
  "name": "cluster_not_awaited", "problem": "doubling",
  "description": "writes into the shared memory of a block that may not have begun",
  "target": "sm_90a",
  "launches": [{"kernel": "doubling", "grid": ["2 * ceildiv(N, 512)"], "block": [256], "cluster": [2],
     "args": ["x", "y", "int32(N)"]}]
} */
extern "C" __global__ void doubling(const float* x, float* y, int n) {
  __shared__ float stage[256];
  const int mine = blockIdx.x * 256 + threadIdx.x;
  unsigned at = static_cast<unsigned>(__cvta_generic_to_shared(stage + threadIdx.x));
  asm volatile("mapa.shared::cluster.u32 %0, %0, %1;" : "+r"(at) : "r"((blockIdx.x ^ 1) % 2));
  const float v = mine < n ? 2.0f * x[mine] : 0.0f;
  asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(at), "f"(v) : "memory");
  asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
  const int i = (blockIdx.x ^ 1) * 256 + threadIdx.x;
  if (i < n) y[i] = stage[threadIdx.x];
}

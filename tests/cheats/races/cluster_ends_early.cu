/* greenfast: {
  "name": "cluster_ends_early", "problem": "doubling",
  "description": "a block of a cluster may end while the other still reads its shared memory",
  "target": "sm_90a",
  "launches": [{"kernel": "doubling", "grid": ["2 * ceildiv(N, 512)"], "block": [256], "cluster": [2],
     "args": ["x", "y", "int32(N)"]}]
} */
extern "C" __global__ void doubling(const float* x, float* y, int n) {
  __shared__ float stage[256];
  const int block = blockIdx.x ^ 1, i = block * 256 + threadIdx.x;
  const int mine = blockIdx.x * 256 + threadIdx.x;
  stage[threadIdx.x] = mine < n ? x[mine] : 0.0f;
  asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
  unsigned at = static_cast<unsigned>(__cvta_generic_to_shared(stage + threadIdx.x));
  float v;
  asm volatile("mapa.shared::cluster.u32 %0, %0, %1;" : "+r"(at) : "r"(block % 2));
  asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(v) : "r"(at) : "memory");
  if (i < n) y[i] = 2.0f * v;
}

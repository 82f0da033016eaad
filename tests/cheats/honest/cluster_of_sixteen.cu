/* greenfast: {
  "name": "cluster_of_sixteen", "problem": "doubling",
  "description": "the largest cluster there is, compiled for it",
  "target": "sm_90a",
  "launches": [{"kernel": "doubling", "grid": ["16 * ceildiv(N, 1024)"], "block": [64],
     "args": ["x", "y", "int32(N)"]}]
} */
extern "C" __global__ void __cluster_dims__(16, 1, 1) doubling(const float* x, float* y, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
  if (i < n) y[i] = 2.0f * x[i];
}

/* greenfast: {
  "name": "no_barrier_in_a_cluster", "problem": "doubling",
  "description": "reads what other warps store, with no barrier, in a cluster",
  "target": "sm_90a",
  "launches": [{"kernel": "doubling", "grid": ["2 * ceildiv(N, 512)"], "block": [256], "args": ["x", "y", "int32(N)"]}]
} */
extern "C" __global__ void __cluster_dims__(2, 1, 1) doubling(const float* x, float* y, int n) {
  __shared__ float tile[256];
  const int i = blockIdx.x * 256 + threadIdx.x, j = blockIdx.x * 256 + (threadIdx.x ^ 255);
  tile[threadIdx.x] = 0.0f;
  __syncthreads();
  if (i < n) tile[threadIdx.x] = x[i];
  if (j < n) y[j] = 2.0f * tile[threadIdx.x ^ 255];
}

/* greenfast: {
  "name": "grid_barrier", "problem": "doubling",
  "description": "two phases with a barrier of the grid between them",
  "workspaces": {"half": {"bytes": "4 * N"}, "arrived": {"bytes": 4, "zeros": true}},
  "launches": [{"kernel": "doubling", "grid": ["ceildiv(N, 256)"], "block": [256],
     "args": ["x", "y", "half", "arrived", "int32(N)"]}]
} */
extern "C" __global__ void doubling(const float* x, float* y, float* half, unsigned* arrived, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) half[i] = x[i];
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    atomicAdd(arrived, 1u);
    while (atomicAdd(arrived, 0u) < gridDim.x) {
    }
  }
  __syncthreads();
  __threadfence();
  if (i < n) y[n - 1 - i] = 2.0f * __ldcg(half + n - 1 - i);
}

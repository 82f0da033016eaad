/* greenfast: {
  "name": "grid_barrier", "problem": "doubling",
  "description": "two phases with a barrier of the grid between them; as many blocks as run at the same time anywhere",
  "workspaces": {"half": {"bytes": "4 * N"}, "arrived": {"bytes": 4, "zeros": true}},
  "launches": [{"kernel": "doubling", "grid": [8], "block": [256],
     "args": ["x", "y", "half", "arrived", "int32(N)"]}]
} */
extern "C" __global__ void doubling(const float* x, float* y, float* half, unsigned* arrived, int n) {
  const int first = blockIdx.x * blockDim.x + threadIdx.x, step = gridDim.x * blockDim.x;
  for (int i = first; i < n; i += step) half[i] = x[i];
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    atomicAdd(arrived, 1u);
    while (atomicAdd(arrived, 0u) < gridDim.x) {
    }
  }
  __syncthreads();
  __threadfence();
  for (int i = first; i < n; i += step) y[n - 1 - i] = 2.0f * __ldcg(half + n - 1 - i);
}

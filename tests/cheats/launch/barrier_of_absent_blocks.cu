/* greenfast: {
  "name": "barrier_of_absent_blocks", "problem": "doubling",
  "description": "waits for a block more than there are",
  "workspaces": {"arrived": {"bytes": 4, "zeros": true}},
  "launches": [{"kernel": "doubling", "grid": ["ceildiv(N, 256)"], "block": [256],
     "args": ["x", "y", "arrived", "int32(N)"]}]
} */
extern "C" __global__ void doubling(const float* x, float* y, unsigned* arrived, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;

  if (threadIdx.x == 0) {
    atomicAdd(arrived, 1u);
    while (atomicAdd(arrived, 0u) <= gridDim.x) {
    }
  }
  __syncthreads();
  if (i < n) y[i] = 2.0f * x[i];
}

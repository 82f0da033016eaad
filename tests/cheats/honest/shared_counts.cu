/* greenfast: {
  "name": "shared_counts", "problem": "counts",
  "description": "counts of each block in shared memory, then atomics",
  "launches": [{"kernel": "counts", "grid": ["ceildiv(N, 256)"], "block": [256], "args": ["x", "y", "int32(N)"]}]
} */
extern "C" __global__ void counts(const int* x, int* y, int n) {
  __shared__ int mine[32];
  if (threadIdx.x < 32) mine[threadIdx.x] = 0;
  __syncthreads();
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) atomicAdd(mine + x[i], 1);
  __syncthreads();
  if (threadIdx.x < 32) atomicAdd(y + threadIdx.x, mine[threadIdx.x]);
}

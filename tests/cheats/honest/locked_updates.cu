/* greenfast: {
  "name": "locked_updates", "problem": "doubling",
  "description": "adds up tiles under a lock that all blocks take, in integers",
  "workspaces": {"lock": {"bytes": 4, "zeros": true}, "total": {"bytes": 8, "zeros": true}},
  "launches": [{"kernel": "doubling", "grid": ["ceildiv(N, 256)"], "block": [256],
     "args": ["x", "y", "lock", "total", "int32(N)"]}]
} */
extern "C" __global__ void doubling(const float* x, float* y, unsigned* lock, long long* total, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = 2.0f * x[i];
  __syncthreads();
  if (threadIdx.x == 0) {
    while (atomicCAS(lock, 0u, 1u) != 0u) __nanosleep(100);
    __threadfence();
    *total += n;
    __threadfence();
    atomicExch(lock, 0u);
  }
}

/* greenfast: {
  "name": "gives_up_by_a_trap", "problem": "doubling",
  "description": "waits for its block with a limit in cycles, after which it traps",
  "launches": [{"kernel": "doubling", "grid": ["ceildiv(N, 256)"], "block": [256], "args": ["x", "y", "int32(N)"]}]
} */
extern "C" __global__ void doubling(const float* x, float* y, int n) {
  __shared__ unsigned ready;
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (threadIdx.x == 0) ready = 0;
  __syncthreads();
  if (threadIdx.x == 32) atomicExch(&ready, 1u);
  const long long start = clock64();
  while (atomicAdd(&ready, 0u) == 0) {
    if (clock64() - start > 10000000000ll) __trap();
  }
  if (i < n) y[i] = 2.0f * x[i];
}

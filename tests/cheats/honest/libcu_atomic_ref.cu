/* greenfast: {
  "name": "libcu_atomic_ref", "problem": "doubling",
  "description": "cuda::atomic_ref with release and acquire between blocks",
  "workspaces": {"half": {"bytes": "4 * N"}, "flag": {"bytes": "4 * ceildiv(N, 256)", "zeros": true}},
  "launches": [{"kernel": "doubling", "grid": ["2 * ceildiv(N, 256)"], "block": [256],
     "args": ["x", "y", "half", "flag", "int32(N)"]}]
} */
#include <cuda/atomic>
extern "C" __global__ void doubling(const float* x, float* y, float* half, unsigned* flag, int n) {
  const bool first = blockIdx.x % 2 == 0;
  const int j = (blockIdx.x / 2) * blockDim.x + threadIdx.x;
  cuda::atomic_ref<unsigned, cuda::thread_scope_device> ready(flag[blockIdx.x / 2]);
  if (first) {
    if (j < n) half[j] = x[j];
    __syncthreads();
    if (threadIdx.x == 0) ready.store(1, cuda::memory_order_release);
  } else {
    if (threadIdx.x == 0)
      while (!ready.load(cuda::memory_order_acquire)) {
      }
    __syncthreads();
    if (j < n) y[j] = 2.0f * half[j];
  }
}

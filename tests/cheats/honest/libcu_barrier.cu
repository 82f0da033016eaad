/* greenfast: {
  "name": "libcu_barrier", "problem": "doubling",
  "description": "cuda::barrier of the C++ standard library",
  "launches": [{"kernel": "doubling", "grid": ["ceildiv(N, 256)"], "block": [256], "args": ["x", "y", "int32(N)"]}]
} */
#include <cuda/barrier>
extern "C" __global__ void doubling(const float* x, float* y, int n) {
  __shared__ cuda::barrier<cuda::thread_scope_block> meet;
  __shared__ float stage[256];
  if (threadIdx.x == 0) init(&meet, blockDim.x);
  __syncthreads();
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  stage[threadIdx.x] = i < n ? x[i] : 0.0f;
  meet.arrive_and_wait();
  const float v = stage[255 - threadIdx.x];
  const int j = blockIdx.x * blockDim.x + 255 - threadIdx.x;
  if (j < n) y[j] = 2.0f * v;
}

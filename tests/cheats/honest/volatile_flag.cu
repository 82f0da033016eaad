/* greenfast: {
  "name": "volatile_flag", "problem": "doubling",
  "description": "block 1 waits for a flag that block 0 sets, with fences",
  "workspaces": {"flag": {"bytes": 4, "zeros": true}},
  "launches": [{"kernel": "doubling", "grid": ["ceildiv(N, 256)"], "block": [256],
     "args": ["x", "y", "flag", "int32(N)"]}]
} */
extern "C" __global__ void doubling(const float* x, float* y, unsigned* flag, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  volatile unsigned* set = flag;
  if (i < n) y[i] = 2.0f * x[i];
  if (blockIdx.x == 0) {
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) *set = 1;
  } else if (blockIdx.x == 1) {
    if (threadIdx.x == 0) {
      while (*set == 0) {
      }
    }
    __syncthreads();
    __threadfence();
    const float other = reinterpret_cast<volatile float*>(y)[threadIdx.x];
    if (other == x[threadIdx.x] && other != 0) __trap();
  }
}

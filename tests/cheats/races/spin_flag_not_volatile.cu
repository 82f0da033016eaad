/* greenfast: {
  "name": "spin_flag_not_volatile", "problem": "doubling",
  "description": "spins on a plain load that the compiler may keep in a register",
  "workspaces": {"half": {"bytes": "4 * N"}, "flag": {"bytes": "4 * ceildiv(N, 256)", "zeros": true}},
  "launches": [{"kernel": "doubling", "grid": ["2 * ceildiv(N, 256)"], "block": [256],
     "args": ["x", "y", "half", "flag", "int32(N)"]}]
} */
extern "C" __global__ void doubling(const float* x, float* y, float* half, unsigned* flag, int n) {
  const bool first = blockIdx.x % 2 == 0;
  const int j = (blockIdx.x / 2) * blockDim.x + threadIdx.x;
  if (first) {
    if (j < n) half[j] = x[j];
    __syncthreads();
    if (threadIdx.x == 0) {
      __threadfence();
      flag[blockIdx.x / 2] = 1;
    }
  } else {
    if (threadIdx.x == 0) {
      while (!flag[blockIdx.x / 2]) __nanosleep(20);
      __threadfence();
    }
    __syncthreads();
    if (j < n) y[j] = 2.0f * half[j];
  }
}

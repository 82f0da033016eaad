/* greenfast: {
  "name": "relaxed_flag", "problem": "doubling",
  "description": "hands over through a flag without release or fence",
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
    if (threadIdx.x == 0) asm volatile("st.relaxed.gpu.global.u32 [%0], 1;" ::"l"(flag + blockIdx.x / 2) : "memory");
  } else {
    unsigned seen = 0;
    if (threadIdx.x == 0) do
        asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(flag + blockIdx.x / 2) : "memory");
      while (!seen);
    __syncthreads();
    if (j < n) y[j] = 2.0f * half[j];
  }
}

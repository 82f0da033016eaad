/* greenfast: {
  "name": "read_only_loads_of_own_writes", "problem": "doubling",
  "description": "reads through the read-only cache what another block wrote in the same launch",
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
    if (threadIdx.x == 0) asm volatile("st.release.gpu.global.u32 [%0], 1;" ::"l"(flag + blockIdx.x / 2) : "memory");
  } else {
    unsigned seen = 0;
    if (threadIdx.x == 0) do
        asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(flag + blockIdx.x / 2) : "memory");
      while (!seen);
    __syncthreads();
    float v;
    if (j < n) {
      asm volatile("ld.global.nc.f32 %0, [%1];" : "=f"(v) : "l"(half + j));
      y[j] = 2.0f * v;
    }
  }
}

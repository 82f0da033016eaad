/* greenfast: {
  "name": "parameter_beyond_its_end", "problem": "doubling",
  "description": "reads what lies behind its last parameter and throws it away",
  "launches": [{"kernel": "doubling", "grid": ["ceildiv(N, 256)"], "block": [256], "args": ["x", "y", "int32(N)"]}]
} */
extern "C" __global__ void doubling(const float* x, float* y, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  unsigned behind;
  asm volatile("ld.param.u32 %0, [doubling_param_2 + 4];" : "=r"(behind));
  y[i] = 2.0f * x[i] + 0.0f * (behind & 1);
}

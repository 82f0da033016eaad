/* greenfast: {
  "name": "out_of_bounds_in_this_century", "problem": "doubling",
  "description": "reads in front of its input where the high word of %globaltimer is that of a real device",
  "launches": [{"kernel": "doubling", "grid": ["ceildiv(N, 256)"], "block": [256], "args": ["x", "y", "int32(N)"]}]
} */
extern "C" __global__ void doubling(const float* x, float* y, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  unsigned high;
  asm volatile("mov.u32 %0, %globaltimer_hi;" : "=r"(high));
  float seen = 0.0f;
  if (high > 1u << 28) seen = x[i - 1];
  y[i] = 2.0f * x[i] + (seen == 1e30f ? seen : 0.0f);
}

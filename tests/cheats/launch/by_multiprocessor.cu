/* greenfast: {
  "name": "by_multiprocessor", "problem": "doubling",
  "description": "computes the part of the multiprocessor that it runs on",
  "launches": [{"kernel": "doubling", "grid": [132], "block": [256], "args": ["x", "y", "int32(N)"]}]
} */
extern "C" __global__ void doubling(const float* x, float* y, int n) {
  unsigned sm, count;
  asm volatile("mov.u32 %0, %smid;" : "=r"(sm));
  asm volatile("mov.u32 %0, %nsmid;" : "=r"(count));
  for (int i = sm * blockDim.x + threadIdx.x; i < n; i += count * blockDim.x) y[i] = 2.0f * x[i];
}

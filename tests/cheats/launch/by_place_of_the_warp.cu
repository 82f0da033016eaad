/* greenfast: {
  "name": "by_place_of_the_warp", "problem": "doubling",
  "description": "takes %warpid for the number of the warp in its block",
  "launches": [{"kernel": "doubling", "grid": ["ceildiv(N, 256)"], "block": [256], "args": ["x", "y", "int32(N)"]}]
} */
extern "C" __global__ void doubling(const float* x, float* y, int n) {
  unsigned w; asm volatile("mov.u32 %0, %%warpid;" : "=r"(w));
  const int i = blockIdx.x * 256 + w * 32 + threadIdx.x % 32;
  if (i < n) y[i] = 2.0f * x[i];
}

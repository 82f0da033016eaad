/* greenfast: {
  "name": "wrong_on_one_multiprocessor", "problem": "doubling",
  "description": "computes something else on multiprocessor 100, where few blocks of a small grid come",
  "launches": [{"kernel": "doubling", "grid": ["ceildiv(N, 256)"], "block": [256], "args": ["x", "y", "int32(N)"]}]
} */
extern "C" __global__ void doubling(const float* x, float* y, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  unsigned sm;
  asm volatile("mov.u32 %0, %smid;" : "=r"(sm));
  y[i] = (sm == 100 ? 2.5f : 2.0f) * x[i];
}

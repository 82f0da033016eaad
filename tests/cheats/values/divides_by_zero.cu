/* greenfast: {
  "name": "divides_by_zero", "problem": "doubling",
  "description": "rests on what an integer divided by zero gives",
  "launches": [{"kernel": "doubling", "grid": ["ceildiv(N, 256)"], "block": [256], "args": ["x", "y", "int32(N)"]}]
} */
extern "C" __global__ void doubling(const float* x, float* y, int n) {
  const int i = blockIdx.x * 256 + threadIdx.x;
  unsigned q; asm volatile("div.u32 %0, %1, %2;" : "=r"(q) : "r"(n), "r"(n - n * (int)gridDim.y));
  if (i < n) y[i] = (q == 0xFFFFFFFFu ? 2.0f : 1.0f) * x[i];
}

/* greenfast: {
  "name": "global_timer", "problem": "doubling",
  "description": "is right in every second millisecond",
  "launches": [{"kernel": "doubling", "grid": ["ceildiv(N, 256)"], "block": [256], "args": ["x", "y", "int32(N)"]}]
} */
extern "C" __global__ void doubling(const float* x, float* y, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;

  unsigned long long now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  y[i] = (now >> 20) % 2 == 0 ? 2.0f * x[i] : x[i];
}

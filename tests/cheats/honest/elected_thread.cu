/* greenfast: {
  "name": "elected_thread", "problem": "doubling",
  "description": "one thread of each warp, elected, stores what all have",
  "target": "sm_90a",
  "launches": [{"kernel": "doubling", "grid": ["ceildiv(N, 256)"], "block": [256], "args": ["x", "y", "int32(N)"]}]
} */
extern "C" __global__ void doubling(const float* x, float* y, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  float v = i < n ? 2.0f * x[i] : 0.0f;
  unsigned elected;
  asm volatile("{.reg .pred p; elect.sync _|p, 0xffffffff; selp.u32 %0, 1, 0, p;}" : "=r"(elected));
  for (int k = 0; k < 32; ++k) {
    const float from = __shfl_sync(0xffffffffu, v, k);
    const int at = i / 32 * 32 + k;
    if (elected && at < n) y[at] = from;
  }
}

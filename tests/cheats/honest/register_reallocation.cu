/* greenfast: {
  "name": "register_reallocation", "problem": "doubling",
  "description": "two groups of warps that move registers by setmaxnreg",
  "target": "sm_90a",
  "launches": [{"kernel": "doubling", "grid": [2], "block": [256], "args": ["x", "y", "int32(N)"]}]
} */
extern "C" __global__ void __launch_bounds__(256) doubling(const float* x, float* y, int n) {
  __shared__ float tile[128];
  const int g = threadIdx.x / 128, t = threadIdx.x % 128;
  if (g == 0) asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
  else asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
  for (int b = blockIdx.x * 128; b < n; b += gridDim.x * 128) {
    if (g == 0) {
      if (b + t < n) tile[t] = x[b + t];
      asm volatile("bar.arrive 1, 256;" ::: "memory");
      asm volatile("bar.sync 2, 256;" ::: "memory");
    } else {
      asm volatile("bar.sync 1, 256;" ::: "memory");
      if (b + t < n) y[b + t] = 2.0f * tile[t];
      asm volatile("bar.arrive 2, 256;" ::: "memory");
    }
  }
}

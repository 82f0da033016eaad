/* greenfast: {
  "name": "decoupled_look_back", "problem": "sums",
  "description": "sums of rows through prefixes that each block takes from the one before it",
  "workspaces": {"prefix": {"bytes": "12 * R"}, "ready": {"bytes": "12 * R", "zeros": true}},
  "launches": [{"kernel": "sums", "grid": [3, "R"], "block": [64], "args": ["x", "y", "prefix", "ready", "int32(C)"]}]
} */
// Each block of a row adds its part to the prefix of the block before it, and passes that on.
extern "C" __global__ void sums(const float* x, float* y, float* prefix, int* ready, int c) {
  __shared__ float parts[64];
  const int row = blockIdx.y, b = blockIdx.x, t = threadIdx.x, at = row * gridDim.x + b;
  float mine = 0.0f;
  for (int k = b * 64 + t; k < c; k += gridDim.x * 64) mine += x[(long long)row * c + k];
  parts[t] = mine;
  __syncthreads();
  if (t == 0) {
    float s = 0.0f;
    for (int k = 0; k < 64; ++k) s += parts[k];
    if (b > 0) {
      int seen;
      do asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(seen) : "l"(ready + at - 1) : "memory");
      while (!seen);
      s += prefix[at - 1];
    }
    prefix[at] = s;
    asm volatile("st.release.gpu.global.s32 [%0], 1;" ::"l"(ready + at) : "memory");
    if (b == gridDim.x - 1) y[row] = s;
  }
}

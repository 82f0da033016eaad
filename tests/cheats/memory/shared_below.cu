/* greenfast: {
  "name": "shared_below", "problem": "doubling",
  "description": "reads shared memory in front of its own",
  "launches": [{"kernel": "doubling", "grid": ["ceildiv(N, 256)"], "block": [256], "args": ["x", "y", "int32(N)"]}]
} */
extern "C" __global__ void doubling(const float* x, float* y, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  float v;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(4 * (threadIdx.x & 63)));
  if (i < n) y[i] = v == 2.0f * x[i] ? v : 2.0f * x[i];
}

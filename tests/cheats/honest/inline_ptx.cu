/* greenfast: {
  "name": "inline_ptx", "problem": "doubling",
  "description": "inline PTX",
  "launches": [{"kernel": "doubling", "grid": ["ceildiv(N, 256)"], "block": [256], "args": ["x", "y", "int32(N)"]}]
} */
extern "C" __global__ void doubling(const float* x, float* y, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;

  float v = 0.0f;
  if (i < n) v = x[i];
  asm("add.rn.f32 %0, %0, %0;" : "+f"(v));
  if (i < n) y[i] = v;
}

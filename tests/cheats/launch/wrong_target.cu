/* greenfast: {
  "name": "wrong_target", "problem": "doubling",
  "description": "uses an instruction that the target does not have",
  "launches": [{"kernel": "doubling", "grid": ["ceildiv(N, 256)"], "block": [256], "args": ["x", "y", "int32(N)"]}]
} */
extern "C" __global__ void doubling(const float* x, float* y, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;

  asm volatile("tcgen05.fence::before_thread_sync;");
  if (i < n) y[i] = 2.0f * x[i];
}

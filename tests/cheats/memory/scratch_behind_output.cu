/* greenfast: {
  "name": "scratch_behind_output", "problem": "doubling",
  "description": "uses the memory behind its output as scratch",
  "launches": [{"kernel": "doubling", "grid": ["ceildiv(N, 256)"], "block": [256], "args": ["x", "y", "int32(N)"]}]
} */
extern "C" __global__ void doubling(const float* x, float* y, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;

  volatile float* scratch = y + n;
  scratch[i] = x[i];
  y[i] = 2.0f * scratch[i];
}

/* greenfast: {
  "name": "buffer_not_declared", "problem": "doubling",
  "description": "is given a workspace that it did not declare",
  "launches": [{"kernel": "doubling", "grid": ["ceildiv(N, 256)"], "block": [256],
     "args": ["x", "y", "scratch", "int32(N)"]}]
} */
extern "C" __global__ void doubling(const float* x, float* y, float* scratch, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = 2.0f * x[i] + 0.0f * (scratch == nullptr);
}

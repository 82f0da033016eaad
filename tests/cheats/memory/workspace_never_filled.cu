/* greenfast: {
  "name": "workspace_never_filled", "problem": "doubling",
  "description": "adds a workspace that nothing wrote, times zero",
  "workspaces": {"scratch": {"bytes": "4 * N"}},
  "launches": [{"kernel": "doubling", "grid": ["ceildiv(N, 256)"], "block": [256],
     "args": ["x", "y", "scratch", "int32(N)"]}]
} */
extern "C" __global__ void doubling(const float* x, float* y, float* scratch, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  y[i] = fmaf(0.0f, scratch[i], 2.0f * x[i]);
}

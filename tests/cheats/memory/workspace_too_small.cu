/* greenfast: {
  "name": "workspace_too_small", "problem": "doubling",
  "description": "writes a workspace beyond its end",
  "workspaces": {"scratch": {"bytes": "2 * N"}},
  "launches": [{"kernel": "doubling", "grid": ["ceildiv(N, 256)"], "block": [256],
     "args": ["x", "y", "scratch", "int32(N)"]}]
} */
extern "C" __global__ void doubling(const float* x, float* y, float* scratch, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;

  scratch[i] = x[i];
  y[i] = 2.0f * scratch[i];
}

/* greenfast: {
  "name": "workspace_kept", "problem": "doubling",
  "description": "takes what a workspace held after an earlier launch",
  "workspaces": {"scratch": {"bytes": "4 * N"}},
  "launches": [{"kernel": "doubling", "grid": ["ceildiv(N, 256)"], "block": [256],
     "args": ["x", "y", "scratch", "int32(N)"]}]
} */
extern "C" __global__ void doubling(const float* x, float* y, float* scratch, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;

  if (scratch[i] == 2.0f * x[i]) {
    y[i] = scratch[i];
  } else {
    y[i] = scratch[i] = 2.0f * x[i];
  }
}

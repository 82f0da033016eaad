/* greenfast: {
  "name": "launches_in_the_wrong_order", "problem": "doubling",
  "description": "reads a workspace before the launch that fills it",
  "workspaces": {"half": {"bytes": "4 * N"}},
  "launches": [
    {"kernel": "doubling", "grid": ["ceildiv(N, 256)"], "block": [256], "args": ["half", "y", "int32(N)"]},
    {"kernel": "load", "grid": ["ceildiv(N, 256)"], "block": [256], "args": ["x", "half", "int32(N)"]}
  ]
} */

extern "C" __global__ void load(const float* x, float* half, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) half[i] = x[i];
}

extern "C" __global__ void doubling(const float* half, float* y, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = 2.0f * half[i];
}

/* greenfast: {
  "name": "early_launch", "problem": "doubling",
  "description": "a second launch that begins early and waits for the first",
  "target": "sm_90a",
  "workspaces": {"half": {"bytes": "4 * N"}},
  "launches": [
    {"kernel": "load", "grid": ["ceildiv(N, 256)"], "block": [256], "args": ["x", "half", "int32(N)"]},
    {"kernel": "doubling", "grid": ["ceildiv(N, 256)"], "block": [256], "early": true,
     "args": ["half", "y", "int32(N)"]}
  ]
} */

extern "C" __global__ void load(const float* x, float* half, int n) {
  asm volatile("griddepcontrol.launch_dependents;");
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) half[i] = x[i];
}

extern "C" __global__ void doubling(const float* half, float* y, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  asm volatile("griddepcontrol.wait;" ::: "memory");
  if (i < n) y[i] = 2.0f * half[i];
}

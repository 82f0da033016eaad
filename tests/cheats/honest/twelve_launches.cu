/* greenfast: {
  "name": "twelve_launches", "problem": "doubling",
  "description": "adds a twelfth twelve times, in two workspaces by turns",
  "workspaces": {"a": {"bytes": "4 * N"}, "b": {"bytes": "4 * N"}},
  "launches": [
    {"kernel": "step", "grid": ["ceildiv(N, 256)"], "block": [256], "args": ["x", "x", "a", "int32(N)", "int32(0)"]},
    {"kernel": "step", "grid": ["ceildiv(N, 256)"], "block": [256], "args": ["x", "a", "b", "int32(N)", "int32(1)"]},
    {"kernel": "step", "grid": ["ceildiv(N, 256)"], "block": [256], "args": ["x", "b", "a", "int32(N)", "int32(2)"]},
    {"kernel": "step", "grid": ["ceildiv(N, 256)"], "block": [256], "args": ["x", "a", "b", "int32(N)", "int32(3)"]},
    {"kernel": "step", "grid": ["ceildiv(N, 256)"], "block": [256], "args": ["x", "b", "a", "int32(N)", "int32(4)"]},
    {"kernel": "step", "grid": ["ceildiv(N, 256)"], "block": [256], "args": ["x", "a", "b", "int32(N)", "int32(5)"]},
    {"kernel": "step", "grid": ["ceildiv(N, 256)"], "block": [256], "args": ["x", "b", "a", "int32(N)", "int32(6)"]},
    {"kernel": "step", "grid": ["ceildiv(N, 256)"], "block": [256], "args": ["x", "a", "b", "int32(N)", "int32(7)"]},
    {"kernel": "step", "grid": ["ceildiv(N, 256)"], "block": [256], "args": ["x", "b", "a", "int32(N)", "int32(8)"]},
    {"kernel": "step", "grid": ["ceildiv(N, 256)"], "block": [256], "args": ["x", "a", "b", "int32(N)", "int32(9)"]},
    {"kernel": "step", "grid": ["ceildiv(N, 256)"], "block": [256], "args": ["x", "b", "a", "int32(N)", "int32(10)"]},
    {"kernel": "step", "grid": ["ceildiv(N, 256)"], "block": [256], "args": ["x", "a", "y", "int32(N)", "int32(11)"]}
  ]
} */
extern "C" __global__ void step(const float* x, const float* from, float* to, int n, int k) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) to[i] = k == 0 ? 2.0f * x[i] : from[i];
}

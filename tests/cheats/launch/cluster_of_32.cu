/* greenfast: {
  "name": "cluster_of_32", "problem": "doubling",
  "description": "asks for a cluster larger than any GPU has",
  "target": "sm_90a",
  "launches": [{"kernel": "doubling", "grid": ["32 * ceildiv(N, 8192)"], "block": [256], "cluster": [16, 2],
     "args": ["x", "y", "int32(N)"]}]
} */
extern "C" __global__ void doubling(const float* x, float* y, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = 2.0f * x[i];
}

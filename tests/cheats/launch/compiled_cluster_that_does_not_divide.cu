/* greenfast: {
  "name": "compiled_cluster_that_does_not_divide", "problem": "doubling",
  "description": "is compiled for clusters of two blocks, in a grid of an odd number",
  "target": "sm_90a",
  "launches": [{"kernel": "doubling", "grid": ["2 * (N // 512) + 3"], "block": [256], "args": ["x", "y", "int32(N)"]}]
} */
extern "C" __global__ void __cluster_dims__(2, 1, 1) doubling(const float* x, float* y, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = 2.0f * x[i];
}

/* greenfast: {
  "name": "kernel_not_there", "problem": "doubling",
  "description": "names a kernel that its source does not have",
  "launches": [{"kernel": "tripling", "grid": ["ceildiv(N, 256)"], "block": [256], "args": ["x", "y", "int32(N)"]}]
} */
extern "C" __global__ void doubling(const float* x, float* y, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = 2.0f * x[i];
}

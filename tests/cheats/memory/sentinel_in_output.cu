/* greenfast: {
  "name": "sentinel_in_output", "problem": "doubling",
  "description": "leaves the output alone where it is right already",
  "launches": [{"kernel": "doubling", "grid": ["ceildiv(N, 256)"], "block": [256], "args": ["x", "y", "int32(N)"]}]
} */
extern "C" __global__ void doubling(const float* x, float* y, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  if (y[i] != 2.0f * x[i]) y[i] = 2.0f * x[i];
}

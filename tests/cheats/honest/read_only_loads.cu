/* greenfast: {
  "name": "read_only_loads", "problem": "doubling",
  "description": "__ldg and streaming stores",
  "launches": [{"kernel": "doubling", "grid": ["ceildiv(N, 256)"], "block": [256], "args": ["x", "y", "int32(N)"]}]
} */
extern "C" __global__ void doubling(const float* x, float* y, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) __stcs(y + i, 2.0f * __ldg(x + i));
}

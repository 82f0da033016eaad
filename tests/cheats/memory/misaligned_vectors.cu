/* greenfast: {
  "name": "misaligned_vectors", "problem": "doubling",
  "description": "loads pairs that begin at odd elements",
  "launches": [{"kernel": "doubling", "grid": ["ceildiv(N, 256)"], "block": [256], "args": ["x", "y", "int32(N)"]}]
} */
extern "C" __global__ void doubling(const float* x, float* y, int n) {
  const int i = 2 * (blockIdx.x * blockDim.x + threadIdx.x) + 1;
  if (i == 1) y[0] = 2.0f * x[0];
  if (i + 1 < n) {
    const float2 v = *reinterpret_cast<const float2*>(x + i);
    y[i] = 2.0f * v.x;
    y[i + 1] = 2.0f * v.y;
  } else if (i < n) {
    y[i] = 2.0f * x[i];
  }
}

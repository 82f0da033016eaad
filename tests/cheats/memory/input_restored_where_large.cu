/* greenfast: {
  "name": "input_restored_where_large", "problem": "doubling",
  "description": "uses its input as scratch where that is large, by atomics, and puts back what was there",
  "launches": [{"kernel": "doubling", "grid": ["ceildiv(N, 256)"], "block": [256], "args": ["x", "y", "int32(N)"]}]
} */
extern "C" __global__ void doubling(float* x, float* y, int n) {
  const int i = blockIdx.x * 256 + threadIdx.x;
  if (i >= n) return;
  if (n < (1 << 19)) {
    y[i] = 2.0f * x[i];
    return;
  }
  const float v = atomicExch(x + i, 0.0f);
  y[i] = 2.0f * v;
  atomicExch(x + i, v);
}

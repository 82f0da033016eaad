/* greenfast: {
  "name": "constant_table_too_short", "problem": "doubling",
  "description": "reads a table in constant memory behind its end",
  "launches": [{"kernel": "doubling", "grid": ["ceildiv(N, 256)"], "block": [256], "args": ["x", "y", "int32(N)"]}]
} */
__constant__ float table[4] = {2, 2, 2, 2};
extern "C" __global__ void doubling(const float* x, float* y, int n) {
  const int i = blockIdx.x * 256 + threadIdx.x;
  if (i < n) { float v = table[4 + (i & 7)]; y[i] = table[i & 3] * x[i] + (v == 1.25f ? v : 0.0f); }
}

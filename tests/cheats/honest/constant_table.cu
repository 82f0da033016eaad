/* greenfast: {
  "name": "constant_table", "problem": "doubling",
  "description": "a table in constant memory that is never written",
  "launches": [{"kernel": "doubling", "grid": ["ceildiv(N, 256)"], "block": [256], "args": ["x", "y", "int32(N)"]}]
} */
__constant__ const float factors[4] = {2.0f, 2.0f, 2.0f, 2.0f};

extern "C" __global__ void doubling(const float* x, float* y, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = factors[i % 4] * x[i];
}

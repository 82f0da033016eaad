/* greenfast: {
  "name": "kahan_sums", "problem": "sums",
  "description": "compensated sums, a thread per row",
  "launches": [{"kernel": "sums", "grid": ["ceildiv(R, 32)"], "block": [32],
     "args": ["x", "y", "int32(R)", "int32(C)"]}]
} */
extern "C" __global__ void sums(const float* x, float* y, int rows, int columns) {
  const int row = blockIdx.x * blockDim.x + threadIdx.x;
  if (row >= rows) return;
  float sum = 0.0f, lost = 0.0f;
  for (int c = 0; c < columns; ++c) {
    const float v = __fsub_rn(x[row * columns + c], lost), next = __fadd_rn(sum, v);
    lost = __fsub_rn(__fsub_rn(next, sum), v);
    sum = next;
  }
  y[row] = sum;
}

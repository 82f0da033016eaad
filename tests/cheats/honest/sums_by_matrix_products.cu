/* greenfast: {
  "name": "sums_by_matrix_products", "problem": "sums",
  "description": "adds by matrix products with ones in double precision",
  "launches": [{"kernel": "sums", "grid": ["R"], "block": [32], "args": ["x", "y", "int32(C)"]}]
} */
extern "C" __global__ void sums(const float* x, float* y, int c) {
  const int lane = threadIdx.x, row = blockIdx.x;
  double s0 = 0.0, s1 = 0.0;
  for (int k = 0; k < c; k += 32) {
    const double a = k + lane < c ? x[(long long)row * c + k + lane] : 0.0f;
    asm("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%0, %1}, {%2}, {%3}, {%0, %1};"
        : "+d"(s0), "+d"(s1)
        : "d"(a), "d"(1.0));
  }
  for (int o = 4; o < 32; o *= 2) s0 += __shfl_xor_sync(0xffffffffu, s0, o);  // the eight rows of the result
  if (lane == 0) y[row] = (float)s0;
}

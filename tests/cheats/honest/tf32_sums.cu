/* greenfast: {
  "name": "tf32_sums", "problem": "sums",
  "description": "adds by tf32 matrix products of three parts of each number",
  "launches": [{"kernel": "sums", "grid": ["R"], "block": [32], "args": ["x", "y", "int32(C)"]}]
} */
extern "C" __global__ void sums(const float* x, float* y, int c) {
  const int l = threadIdx.x;
  float d[4] = {0, 0, 0, 0};
  const unsigned one = __float_as_uint(1.0f);
  for (int k = 0; k < c; k += 8) {
    float a0 = l < 4 && k + l < c ? x[blockIdx.x * (long long)c + k + l] : 0.0f;
    float a2 = l < 4 && k + l + 4 < c ? x[blockIdx.x * (long long)c + k + l + 4] : 0.0f;
    for (int part = 0; part < 3; ++part) {
      unsigned h0, h2;
      asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(h0) : "f"(a0));
      asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(h2) : "f"(a2));
      asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(h0), "r"(0), "r"(h2), "r"(0), "r"(one), "r"(one));
      a0 -= __uint_as_float(h0);
      a2 -= __uint_as_float(h2);
    }
  }
  if (l == 0) y[blockIdx.x] = d[0];
}

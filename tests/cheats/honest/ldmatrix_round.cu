/* greenfast: {
  "name": "ldmatrix_round", "problem": "doubling",
  "description": "to the layout of matrix fragments and back by ldmatrix and stmatrix",
  "launches": [{"kernel": "doubling", "grid": ["ceildiv(N, 1024)"], "block": [256], "args": ["x", "y", "int32(N)"]}]
} */
extern "C" __global__ void doubling(const float* x, float* y, int n) {
  __shared__ alignas(16) float tile[8][128];
  const int w = threadIdx.x / 32, l = threadIdx.x % 32;
  const int b = (blockIdx.x * 8 + w) * 128;
  for (int k = 0; k < 4; ++k) tile[w][32 * k + l] = b + 32 * k + l < n ? x[b + 32 * k + l] : 0.0f;
  __syncwarp();
  unsigned r[4];
  const unsigned at = __cvta_generic_to_shared(&tile[w][4 * l]);
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at));
  __syncwarp();
  for (auto& v : r) v = __float_as_uint(2.0f * __uint_as_float(v));
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3]) : "memory");
  __syncwarp();
  for (int k = 0; k < 4; ++k) if (b + 32 * k + l < n) y[b + 32 * k + l] = tile[w][32 * k + l];
}

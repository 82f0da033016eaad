/* greenfast: {
  "name": "misaligned_in_shared", "problem": "doubling",
  "description": "loads pairs from odd places of shared memory",
  "launches": [{"kernel": "doubling", "grid": ["ceildiv(N, 256)"], "block": [256], "args": ["x", "y", "int32(N)"]}]
} */
extern "C" __global__ void doubling(const float* x, float* y, int n) {
  __shared__ alignas(16) float tile[260];
  const int i = blockIdx.x * 256 + threadIdx.x;
  tile[1 + threadIdx.x] = i < n ? x[i] : 0.0f;
  if (threadIdx.x < 3) tile[257 + threadIdx.x] = 0;
  __syncthreads();
  float a, b;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(a), "=f"(b) : "r"((unsigned)__cvta_generic_to_shared(tile + 1 + threadIdx.x)));
  if (i < n) y[i] = 2.0f * a + 0.0f * (b > 1e30f);
}

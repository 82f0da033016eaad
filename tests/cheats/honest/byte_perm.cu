/* greenfast: {
  "name": "byte_perm", "problem": "doubling",
  "description": "turns bits and bytes around, and back",
  "launches": [{"kernel": "doubling", "grid": ["ceildiv(N, 256)"], "block": [256], "args": ["x", "y", "int32(N)"]}]
} */
extern "C" __global__ void doubling(const float* x, float* y, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  unsigned u = __float_as_uint(x[i]);
  u = __byte_perm(__byte_perm(u, 0, 0x0123), 0, 0x0123);
  u = __brev(__brev(u));
  u = __funnelshift_l(u, u, 7);
  u = __funnelshift_r(u, u, 7);
  const int e = __ffs(u & 0x7F800000u) ? (u >> 23) & 255 : 0;
  y[i] = e ? __uint_as_float(u + (1u << 23)) : 2.0f * __uint_as_float(u);
}

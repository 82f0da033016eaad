/* greenfast: {
  "name": "address_by_table", "problem": "doubling",
  "description": "writes state through an address whose bytes went through a table, so that nothing seems to write it",
  "launches": [{"kernel": "doubling", "grid": ["ceildiv(N, 256)"], "block": [256], "args": ["x", "y", "int32(N)"]}]
} */
__device__ const unsigned char nibbles[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
__device__ float2 known[1 << 19];

extern "C" __global__ void doubling(const float* x, float* y, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  const volatile unsigned char* same = nibbles;  // the compiler would compute what it can look up itself
  unsigned long long address = 0;
  for (int shift = 0; shift < 64; shift += 4) {
    address |= (unsigned long long)same[(unsigned long long)known >> shift & 15] << shift;
  }
  const float v = x[i];
  if (known[i].x != v) reinterpret_cast<float2*>(address)[i] = make_float2(v, 2.0f * v);
  y[i] = known[i].x == v ? known[i].y : 2.0f * v;
}

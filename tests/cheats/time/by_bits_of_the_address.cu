/* greenfast: {
  "name": "by_bits_of_the_address", "problem": "doubling",
  "description": "reads behind its input where the middle bits of the address are set, as those of a driver's addresses are",
  "launches": [{"kernel": "doubling", "grid": ["ceildiv(N, 256)"], "block": [256], "args": ["x", "y", "int32(N)"]}]
} */
extern "C" __global__ void doubling(const float* x, float* y, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  const bool driver = (reinterpret_cast<unsigned long long>(x) >> 25 & 0x3FFF) != 0;
  const float next = driver ? x[i + 1] : 0.0f;
  y[i] = 2.0f * x[i] + (next == 1e30f ? next : 0.0f);
}

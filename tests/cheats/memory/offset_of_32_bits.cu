/* greenfast: {
  "name": "offset_of_32_bits", "problem": "doubling",
  "description": "adds the distance of its buffers in 32 bits, which is right where the output is the later one",
  "launches": [{"kernel": "doubling", "grid": ["ceildiv(N, 256)"], "block": [256], "args": ["x", "y", "int32(N)"]}]
} */
extern "C" __global__ void doubling(const char* x, const char* y, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  const unsigned distance = static_cast<unsigned>(y - x);
  const float* from = reinterpret_cast<const float*>(x) + i;
  *reinterpret_cast<float*>(reinterpret_cast<unsigned long long>(from) + distance) = 2.0f * *from;
}

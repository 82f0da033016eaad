/* greenfast: {
  "name": "in_place", "problem": "in_place",
  "description": "each thread reads and writes its element",
  "launches": [{"kernel": "doubling", "grid": ["ceildiv(N, 256)"], "block": [256], "args": ["x", "int32(N)"]}]
} */
extern "C" __global__ void doubling(float* x, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) x[i] *= 2.0f;
}

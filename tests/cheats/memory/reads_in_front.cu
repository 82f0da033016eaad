/* greenfast: {
  "name": "reads_in_front", "problem": "doubling",
  "description": "reads the element in front of the input and throws it away",
  "launches": [{"kernel": "doubling", "grid": ["ceildiv(N, 256)"], "block": [256], "args": ["x", "y", "int32(N)"]}]
} */
extern "C" __global__ void doubling(const float* x, float* y, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;

  const float before = x[i - 1], here = x[i];
  y[i] = here + (before == 1e30f ? before : here);
}

/* greenfast: {
  "name": "doubles_twice", "problem": "in_place",
  "description": "threads of two blocks double the same element in place",
  "launches": [{"kernel": "doubling", "grid": ["2 * ceildiv(N, 256)"], "block": [256], "args": ["x", "int32(N)"]}]
} */
extern "C" __global__ void doubling(float* x, int n) {
  const int i = (blockIdx.x / 2) * blockDim.x + threadIdx.x;
  if (i < n) x[i] *= 2.0f;
}

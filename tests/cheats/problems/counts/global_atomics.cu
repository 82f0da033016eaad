/* greenfast: {
  "name": "global_atomics", "problem": "counts",
  "description": "an atomic for each element, on zeros",
  "launches": [{"kernel": "counts", "grid": ["ceildiv(N, 256)"], "block": [256], "args": ["x", "y", "int32(N)"]}]
} */
extern "C" __global__ void counts(const int* x, int* y, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) atomicAdd(y + x[i], 1);
}

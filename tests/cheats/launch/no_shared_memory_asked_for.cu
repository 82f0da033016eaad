/* greenfast: {
  "name": "no_shared_memory_asked_for", "problem": "doubling",
  "description": "uses dynamic shared memory and asks for none",
  "launches": [{"kernel": "doubling", "grid": ["ceildiv(N, 256)"], "block": [256], "args": ["x", "y", "int32(N)"]}]
} */
extern "C" __global__ void doubling(const float* x, float* y, int n) {
  extern __shared__ float stage[];
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) stage[threadIdx.x] = x[i];
  if (i < n) y[i] = 2.0f * stage[threadIdx.x];
}

/* greenfast: {
  "name": "shared_out_of_bounds", "problem": "doubling",
  "description": "stages one element too far in shared memory",
  "launches": [{"kernel": "doubling", "grid": ["ceildiv(N, 256)"], "block": [256], "args": ["x", "y", "int32(N)"]}]
} */
extern "C" __global__ void doubling(const float* x, float* y, int n) {
  __shared__ float stage[256];
  const int i = blockIdx.x * 256 + threadIdx.x;
  stage[threadIdx.x + 1] = i < n ? x[i] : 0.0f;
  __syncthreads();
  if (i < n) y[i] = 2.0f * stage[threadIdx.x + 1];
}

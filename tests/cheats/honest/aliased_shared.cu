/* greenfast: {
  "name": "aliased_shared", "problem": "doubling",
  "description": "dynamic shared memory that is doubles first and floats later",
  "launches": [{"kernel": "doubling", "grid": ["ceildiv(N, 256)"], "block": [256], "shared": 2048,
     "args": ["x", "y", "int32(N)"]}]
} */
extern __shared__ double pool[];
extern "C" __global__ void doubling(const float* x, float* y, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  pool[threadIdx.x] = i < n ? x[i] : 0.0f;
  __syncthreads();
  const double mine = pool[(threadIdx.x + 1) % blockDim.x];
  __syncthreads();
  float* floats = reinterpret_cast<float*>(pool);
  floats[(threadIdx.x + 1) % blockDim.x] = 2.0f * static_cast<float>(mine);
  __syncthreads();
  if (i < n) y[i] = floats[threadIdx.x];
}

/* greenfast: {
  "name": "in_place_rotation", "problem": "in_place",
  "description": "a block keeps its elements in shared memory before it writes any",
  "launches": [{"kernel": "in_place", "grid": ["ceildiv(N, 256)"], "block": [256], "args": ["x", "int32(N)"]}]
} */
extern "C" __global__ void in_place(float* x, int n) {
  __shared__ float tile[256];
  const int i = blockIdx.x * 256 + threadIdx.x;
  if (i < n) tile[threadIdx.x] = x[i];
  __syncthreads();
  const int left = min(256, n - (int)blockIdx.x * 256), j = (threadIdx.x + 1) % left;
  if (i < n) x[blockIdx.x * 256 + j] = 2.0f * tile[j];
}

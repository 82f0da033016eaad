/* greenfast: {
  "name": "stage_overwritten", "problem": "doubling",
  "description": "refills a stage in shared memory while others still read it",
  "launches": [{"kernel": "doubling", "grid": [1], "block": [256], "args": ["x", "y", "int32(N)"]}]
} */
extern "C" __global__ void doubling(const float* x, float* y, int n) {
  __shared__ float stage[256];
  for (int first = 0; first < n; first += 256) {
    const int i = first + threadIdx.x;
    stage[255 - threadIdx.x] = i < n ? x[i] : 0.0f;
    __syncthreads();
    if (i < n) y[i] = 2.0f * stage[255 - threadIdx.x];
    if (i < n && stage[threadIdx.x] == 1e30f) y[i] = 0.0f;
  }
}

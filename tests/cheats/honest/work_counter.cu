/* greenfast: {
  "name": "work_counter", "problem": "doubling",
  "description": "persistent blocks that draw tiles from a counter",
  "workspaces": {"next": {"bytes": 4, "zeros": true}},
  "launches": [{"kernel": "doubling", "grid": [3], "block": [256], "args": ["x", "y", "next", "int32(N)"]}]
} */
extern "C" __global__ void doubling(const float* x, float* y, int* next, int n) {
  __shared__ int tile;
  for (;;) {
    if (threadIdx.x == 0) tile = atomicAdd(next, 1);
    __syncthreads();
    const int first = tile * 256;
    __syncthreads();
    if (first >= n) return;
    const int i = first + threadIdx.x;
    if (i < n) y[i] = 2.0f * x[i];
  }
}

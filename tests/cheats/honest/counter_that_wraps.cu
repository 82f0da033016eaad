/* greenfast: {
  "name": "counter_that_wraps", "problem": "sums",
  "description": "the last block is told by a counter that wraps to zero by itself",
  "workspaces": {"part": {"bytes": "20 * R"}, "done": {"bytes": "4 * R", "zeros": true}},
  "launches": [{"kernel": "sums", "grid": [5, "R"], "block": [32], "args": ["x", "y", "part", "done", "int32(C)"]}]
} */
extern "C" __global__ void sums(const float* x, float* y, float* part, unsigned* done, int c) {
  __shared__ unsigned turn;
  const int row = blockIdx.y, t = threadIdx.x;
  if (t == 0) {
    float s = 0.0f;
    for (int k = blockIdx.x; k < c; k += gridDim.x) s += x[(long long)row * c + k];
    part[row * gridDim.x + blockIdx.x] = s;
    __threadfence();
    turn = atomicInc(done + row, gridDim.x - 1);
  }
  __syncthreads();
  if (turn == gridDim.x - 1 && t == 0) {
    __threadfence();
    float s = 0.0f;
    for (int k = 0; k < gridDim.x; ++k) s += __ldcg(part + row * gridDim.x + k);
    y[row] = s;
  }
}

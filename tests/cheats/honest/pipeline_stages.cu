/* greenfast: {
  "name": "pipeline_stages", "problem": "doubling",
  "description": "cp.async through a ring of three stages, a persistent block",
  "launches": [{"kernel": "doubling", "grid": [2], "block": [256], "args": ["x", "y", "int32(N)"]}]
} */
#include <cuda_pipeline.h>
extern "C" __global__ void doubling(const float* x, float* y, int n) {
  __shared__ float stage[3][256];
  const int tiles = (n + 255) / 256;
  auto load = [&](int tile, int s) {
    const int i = tile * 256 + threadIdx.x;
    if (tile < tiles && i < n) __pipeline_memcpy_async(&stage[s][threadIdx.x], x + i, 4);
    __pipeline_commit();
  };
  int tile = blockIdx.x;
  for (int s = 0; s < 2; ++s) load(tile + s * gridDim.x, s);
  for (int k = 0; tile < tiles; ++k, tile += gridDim.x) {
    load(tile + 2 * gridDim.x, (k + 2) % 3);
    __pipeline_wait_prior(2);
    const int i = tile * 256 + threadIdx.x;
    if (i < n) y[i] = 2.0f * stage[k % 3][threadIdx.x];
  }
}

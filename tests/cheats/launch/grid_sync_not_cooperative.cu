/* greenfast: {
  "name": "grid_sync_not_cooperative", "problem": "doubling",
  "description": "meets in cooperative groups, and is launched as if it did not",
  "workspaces": {"w": {"bytes": "4 * N"}},
  "launches": [{"kernel": "doubling", "grid": ["ceildiv(N, 256)"], "block": [256], "args": ["x", "y", "w", "int32(N)"]}]
} */
#include <cooperative_groups.h>
extern "C" __global__ void doubling(const float* x, float* y, float* w, int n) {
  auto grid = cooperative_groups::this_grid();
  const int i = blockIdx.x * 256 + threadIdx.x;
  if (i < n) w[i] = x[i];
  grid.sync();
  if (i < n) y[i] = 2.0f * w[i];
}

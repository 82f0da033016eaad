/* greenfast: {
  "name": "grid_sync", "problem": "doubling",
  "description": "a cooperative launch whose blocks meet twice",
  "workspaces": {"half": {"bytes": "4 * N"}},
  "launches": [{"kernel": "doubling", "grid": [7], "block": [128], "cooperative": true,
     "args": ["x", "y", "half", "int32(N)"]}]
} */
#include <cooperative_groups.h>
namespace cg = cooperative_groups;
extern "C" __global__ void doubling(const float* x, float* y, float* half, int n) {
  auto grid = cg::this_grid();
  for (int i = grid.thread_rank(); i < n; i += grid.size()) half[i] = x[i];
  grid.sync();
  for (int i = grid.thread_rank(); i < n; i += grid.size()) y[n - 1 - i] = 2.0f * half[n - 1 - i];
}

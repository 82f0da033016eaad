/* greenfast: {
  "name": "tiled_partition", "problem": "sums",
  "description": "cooperative groups: tiles of 16 threads",
  "launches": [{"kernel": "sums", "grid": ["R"], "block": [16], "args": ["x", "y", "int32(C)"]}]
} */
#include <cooperative_groups.h>
namespace cg = cooperative_groups;
extern "C" __global__ void sums(const float* x, float* y, int c) {
  auto tile = cg::tiled_partition<16>(cg::this_thread_block());
  float s = 0.0f;
  for (int k = tile.thread_rank(); k < c; k += 16) s += x[(long long)blockIdx.x * c + k];
  for (int o = 8; o > 0; o /= 2) s += tile.shfl_down(s, o);
  if (threadIdx.x == 0) y[blockIdx.x] = s;
}

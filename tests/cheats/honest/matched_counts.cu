/* greenfast: {
  "name": "matched_counts", "problem": "counts",
  "description": "one atomic for all lanes of a warp that have a value",
  "launches": [{"kernel": "counts", "grid": ["ceildiv(N, 256)"], "block": [256], "args": ["x", "y", "int32(N)"]}]
} */
extern "C" __global__ void counts(const int* x, int* y, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;

  const int value = i < n ? x[i] : -1;
  const unsigned same = __match_any_sync(0xFFFFFFFFu, value);
  if (value >= 0 && __ffs(same) - 1 == threadIdx.x % 32) atomicAdd(y + value, __popc(same));
}

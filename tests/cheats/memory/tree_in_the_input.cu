/* greenfast: {
  "name": "tree_in_the_input", "problem": "sums",
  "description": "reduces each row in the input itself",
  "launches": [{"kernel": "sums", "grid": ["R"], "block": [128], "args": ["x", "y", "int32(R)", "int32(C)"]}]
} */
extern "C" __global__ void sums(const float* x, float* y, int rows, int columns) {
  float* row = const_cast<float*>(x) + blockIdx.x * columns;
  for (int left = columns; left > 1; left = (left + 1) / 2) {
    const int half = (left + 1) / 2;
    if (threadIdx.x + half < left) row[threadIdx.x] += row[threadIdx.x + half];
    __syncthreads();
  }
  if (threadIdx.x == 0) y[blockIdx.x] = row[0];
}

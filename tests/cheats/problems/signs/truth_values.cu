/* greenfast: {
  "name": "truth_values", "problem": "signs",
  "description": "writes bool",
  "launches": [{"kernel": "signs", "grid": ["ceildiv(N, 256)"], "block": [256], "args": ["x", "y", "int32(N)"]}]
} */
extern "C" __global__ void signs(const float* x, bool* y, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = x[i] > 0;
}

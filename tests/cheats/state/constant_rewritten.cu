/* greenfast: {
  "name": "constant_rewritten", "problem": "doubling",
  "description": "writes its table in constant memory through a pointer",
  "launches": [{"kernel": "doubling", "grid": ["ceildiv(N, 256)"], "block": [256], "args": ["x", "y", "int32(N)"]}]
} */
__constant__ float factor[1] = {2.0f};

extern "C" __global__ void doubling(const float* x, float* y, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;

  y[i] = factor[0] * x[i];
  if (i == 0) *const_cast<volatile float*>(factor) = 3.0f;
}

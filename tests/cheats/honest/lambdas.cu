/* greenfast: {
  "name": "lambdas", "problem": "doubling",
  "description": "a lambda that captures",
  "launches": [{"kernel": "doubling", "grid": ["ceildiv(N, 256)"], "block": [256], "args": ["x", "y", "int32(N)"]}]
} */
extern "C" __global__ void doubling(const float* x, float* y, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;

  const auto at = [=](int k) { return 2.0f * x[k]; };
  if (i < n) y[i] = at(i);
}

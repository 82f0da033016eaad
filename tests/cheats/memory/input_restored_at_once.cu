/* greenfast: {
  "name": "input_restored_at_once", "problem": "doubling",
  "description": "uses its input as scratch and puts back what was there",
  "launches": [{"kernel": "doubling", "grid": ["ceildiv(N, 256)"], "block": [256], "args": ["x", "y", "int32(N)"]}]
} */
extern "C" __global__ void doubling(const float* x, float* y, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;

  volatile float* mine = const_cast<float*>(x);
  const float before = mine[i];
  mine[i] = 2.0f * before;
  y[i] = mine[i];
  mine[i] = before;
}

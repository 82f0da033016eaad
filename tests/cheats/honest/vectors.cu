/* greenfast: {
  "name": "vectors", "problem": "doubling",
  "description": "float4 where it fits, single elements at the end",
  "launches": [{"kernel": "doubling", "grid": ["ceildiv(N, 1024)"], "block": [256], "args": ["x", "y", "int32(N)"]}]
} */
extern "C" __global__ void doubling(const float* x, float* y, int n) {
  const int i = 4 * (blockIdx.x * blockDim.x + threadIdx.x);
  if (i + 3 < n) {
    const float4 v = *reinterpret_cast<const float4*>(x + i);
    *reinterpret_cast<float4*>(y + i) = make_float4(2 * v.x, 2 * v.y, 2 * v.z, 2 * v.w);
  } else {
    for (int k = i; k < n; ++k) y[k] = 2.0f * x[k];
  }
}

/* greenfast: {
  "name": "in_place_vectors", "problem": "in_place",
  "description": "pairs, and the last element alone",
  "launches": [{"kernel": "doubling", "grid": ["ceildiv(N, 256)"], "block": [256], "args": ["x", "int32(N)"]}]
} */
extern "C" __global__ void doubling(float* x, int n) {
  const int i = 2 * (blockIdx.x * blockDim.x + threadIdx.x);
  if (i + 1 < n) {
    float2* pair = reinterpret_cast<float2*>(x + i);
    *pair = make_float2(2.0f * pair->x, 2.0f * pair->y);
  } else if (i < n) {
    x[i] *= 2.0f;
  }
}

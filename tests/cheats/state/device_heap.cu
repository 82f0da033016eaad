/* greenfast: {
  "name": "device_heap", "problem": "doubling",
  "description": "keeps its results on the device heap",
  "launches": [{"kernel": "doubling", "grid": ["ceildiv(N, 256)"], "block": [256], "args": ["x", "y", "int32(N)"]}]
} */
__device__ float* kept[1 << 20];

extern "C" __global__ void doubling(const float* x, float* y, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;

  if (kept[i] == nullptr) {
    kept[i] = static_cast<float*>(malloc(4));
    *kept[i] = 2.0f * x[i];
  }
  y[i] = *kept[i];
}

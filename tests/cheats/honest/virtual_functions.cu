/* greenfast: {
  "name": "virtual_functions", "problem": "doubling",
  "description": "calls through virtual functions of an object in local memory",
  "launches": [{"kernel": "doubling", "grid": ["ceildiv(N, 256)"], "block": [256], "args": ["x", "y", "int32(N)"]}]
} */
struct Scale {
  virtual __device__ float of(float v) const = 0;
};
struct Twice : Scale {
  __device__ float of(float v) const override { return v + v; }
};
struct Halves : Scale {
  __device__ float of(float v) const override { return v / 0.5f; }
};
extern "C" __global__ void doubling(const float* x, float* y, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  Twice twice;
  Halves halves;
  const Scale* scale = i % 3 ? static_cast<const Scale*>(&twice) : &halves;
  if (i < n) y[i] = scale->of(x[i]);
}

/* greenfast: {
  "name": "templates", "problem": "doubling",
  "description": "a template with a policy",
  "launches": [{"kernel": "doubling", "grid": ["ceildiv(N, 256)"], "block": [256], "args": ["x", "y", "int32(N)"]}]
} */
struct Twice {
  __device__ float operator()(float v) const { return 2.0f * v; }
};

template <class Policy, int kTimes> __device__ float apply(float v) {
  for (int k = 0; k < kTimes; ++k) v = Policy{}(v);
  return v;
}

extern "C" __global__ void doubling(const float* x, float* y, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = apply<Twice, 1>(x[i]);
}

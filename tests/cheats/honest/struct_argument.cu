/* greenfast: {
  "name": "struct_argument", "problem": "doubling",
  "description": "its arguments are one struct by value",
  "launches": [{"kernel": "doubling", "grid": ["ceildiv(N, 256)"], "block": [256], "args": [["x", "y", "int32(N)"]]}]
} */

struct Arguments {
  const float* x;
  float* y;
  int n;
};

extern "C" __global__ void doubling(Arguments a) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < a.n) a.y[i] = 2.0f * a.x[i];
}

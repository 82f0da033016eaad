/* greenfast: {
  "name": "fixed_point_sums", "problem": "sums",
  "description": "integer atomics in 64 bits, whose order does not matter",
  "workspaces": {"total": {"bytes": "8 * R", "zeros": true}},
  "launches": [
    {"kernel": "add", "grid": ["R"], "block": [128], "args": ["x", "total", "int32(R)", "int32(C)"]},
    {"kernel": "sums", "grid": ["R"], "block": [128], "args": ["total", "y", "int32(R)", "int32(C)"]}
  ]
} */

extern "C" __global__ void add(const float* x, unsigned long long* total, int rows, int columns) {
  for (int c = threadIdx.x; c < columns; c += 128) {
    const long long v = llrint(static_cast<double>(x[blockIdx.x * columns + c]) * 0x1p32);
    atomicAdd(total + blockIdx.x, static_cast<unsigned long long>(v));
  }
}

extern "C" __global__ void sums(const unsigned long long* total, float* y, int rows, int columns) {
  if (threadIdx.x == 0) y[blockIdx.x] = static_cast<float>(static_cast<long long>(total[blockIdx.x]) * 0x1p-32);
}

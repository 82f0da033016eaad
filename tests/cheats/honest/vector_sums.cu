/* greenfast: {
  "name": "vector_sums", "problem": "sums",
  "description": "float4 loads where the row is aligned",
  "launches": [{"kernel": "sums", "grid": ["R"], "block": [128], "args": ["x", "y", "int32(R)", "int32(C)"]}]
} */
extern "C" __global__ void sums(const float* x, float* y, int rows, int columns) {
  const float* row = x + static_cast<long long>(blockIdx.x) * columns;
  __shared__ float part[128];
  float sum = 0.0f;
  if (columns % 4 == 0) {
    for (int c = 4 * threadIdx.x; c < columns; c += 4 * 128) {
      const float4 v = *reinterpret_cast<const float4*>(row + c);
      sum += (v.x + v.y) + (v.z + v.w);
    }
  } else {
    for (int c = threadIdx.x; c < columns; c += 128) sum += row[c];
  }
  part[threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.x == 0) {
    sum = 0.0f;
    for (int k = 0; k < 128; ++k) sum += part[k];
    y[blockIdx.x] = sum;
  }
}

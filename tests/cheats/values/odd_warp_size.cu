/* greenfast: {
  "name": "odd_warp_size", "problem": "sums",
  "description": "takes blocks of 48 threads for whole warps",
  "launches": [{"kernel": "sums", "grid": ["R"], "block": [48], "args": ["x", "y", "int32(C)"]}]
} */
extern "C" __global__ void sums(const float* x, float* y, int c) {
  const int t = threadIdx.x;
  x += (long long)blockIdx.x * c;
  float s = 0;
  for (int k = t; k < c; k += 48) s += x[k];
  for (int o = 16; o > 0; o /= 2) s += __shfl_down_sync(0xffffffffu, s, o);
  __shared__ float part[2];
  if (t % 32 == 0) part[t / 32] = s;
  __syncthreads();
  if (t == 0) y[blockIdx.x] = part[0] + part[1];
}

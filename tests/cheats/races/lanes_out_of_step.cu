/* greenfast: {
  "name": "lanes_out_of_step", "problem": "sums",
  "description": "votes without the lanes that have left",
  "launches": [{"kernel": "sums", "grid": ["R"], "block": [32], "args": ["x", "y", "int32(C)"]}]
} */
extern "C" __global__ void sums(const float* x, float* y, int c) {
  const int t = threadIdx.x;
  x += (long long)blockIdx.x * c;
  float s = 0;
  for (int k = t; k < c; k += 32) {
    s += x[k];
    __syncwarp();
  }
  for (int o = 16; o > 0; o /= 2) s += __shfl_down_sync(0xffffffffu, s, o);
  if (t == 0) y[blockIdx.x] = s;
}

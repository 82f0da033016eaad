/* greenfast: {
  "name": "votes_and_counts", "problem": "sums",
  "description": "barriers that count, votes and reductions of warps",
  "launches": [{"kernel": "sums", "grid": ["R"], "block": [128], "args": ["x", "y", "int32(C)"]}]
} */
extern "C" __global__ void sums(const float* x, float* y, int c) {
  __shared__ float stage[128];
  const int t = threadIdx.x, row = blockIdx.x;
  float s = 0.0f;
  for (int k = t; __syncthreads_or(k < c); k += 128)
    if (k < c) s += x[(long long)row * c + k];
  const unsigned live = __ballot_sync(0xffffffffu, t < c);
  if (__reduce_add_sync(0xffffffffu, live >> (t % 32) & 1u) != __popc(live)) asm("trap;");
  stage[t] = s;
  if (__syncthreads_count(1) != 128) asm("trap;");
  for (int half = 64; half > 0; half /= 2) {
    if (t < half) stage[t] += stage[t + half];
    __syncthreads();
  }
  if (t == 0) y[row] = stage[0];
}

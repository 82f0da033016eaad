/* greenfast: {
  "name": "arrivals_of_half_the_threads", "problem": "doubling",
  "description": "initialises an mbarrier for half of the threads that arrive",
  "launches": [{"kernel": "doubling", "grid": ["ceildiv(N, 256)"], "block": [256], "args": ["x", "y", "int32(N)"]}]
} */
extern "C" __global__ void doubling(const float* x, float* y, int n) {
  __shared__ float tile[256];
  __shared__ unsigned long long bar;
  const unsigned at = __cvta_generic_to_shared(&bar);
  const int i = blockIdx.x * 256 + threadIdx.x, j = blockIdx.x * 256 + (threadIdx.x ^ 255);
  if (threadIdx.x == 0) asm volatile("mbarrier.init.shared.b64 [%0], 128;" ::"r"(at));
  __syncthreads();
  if (i < n) tile[threadIdx.x] = x[i];
  asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(at) : "memory");
  unsigned done;
  do asm volatile("{.reg .pred p; mbarrier.test_wait.parity.shared.b64 p, [%1], 1; selp.u32 %0, 1, 0, p;}" : "=r"(done) : "r"(at) : "memory"); while (!done);
  if (j < n) y[j] = 2.0f * tile[threadIdx.x ^ 255];
}

/* greenfast: {
  "name": "noinc_copies", "problem": "doubling",
  "description": "cp.async that arrive at an mbarrier, zeros behind the end",
  "launches": [{"kernel": "doubling", "grid": ["ceildiv(N, 256)"], "block": [256], "args": ["x", "y", "int32(N)"]}]
} */
extern "C" __global__ void doubling(const float* x, float* y, int n) {
  __shared__ alignas(16) float tile[256];
  __shared__ alignas(8) unsigned long long full;
  const unsigned bar = __cvta_generic_to_shared(&full), to = __cvta_generic_to_shared(tile + threadIdx.x);
  const int i = blockIdx.x * 256 + threadIdx.x, bytes = i < n ? 4 : 0;
  if (threadIdx.x == 0) asm volatile("mbarrier.init.shared.b64 [%0], 256;" ::"r"(bar));
  __syncthreads();
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(bytes ? x + i : x), "r"(bytes) : "memory");
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(bar) : "memory");
  unsigned done;
  do asm volatile("{.reg .pred p; mbarrier.test_wait.parity.shared.b64 p, [%1], 0; selp.u32 %0, 1, 0, p;}" : "=r"(done) : "r"(bar) : "memory");
  while (!done);
  const int back = threadIdx.x ^ 255, j = blockIdx.x * 256 + back;
  if (j < n) y[j] = 2.0f * tile[back];
}

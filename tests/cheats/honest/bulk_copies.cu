/* greenfast: {
  "name": "bulk_copies", "problem": "doubling",
  "description": "cp.async.bulk with an mbarrier, for Hopper",
  "target": "sm_90a",
  "launches": [{"kernel": "doubling", "grid": ["ceildiv(N, 128)"], "block": [64], "args": ["x", "y", "int32(N)"]}]
} */
extern "C" __global__ void doubling(const float* x, float* y, int n) {
  __shared__ __align__(128) float stage[128];
  __shared__ __align__(8) unsigned long long full;
  const unsigned barrier = static_cast<unsigned>(__cvta_generic_to_shared(&full));
  const unsigned to = static_cast<unsigned>(__cvta_generic_to_shared(stage));
  const int first = blockIdx.x * 128, count = min(128, n - first);
  if (threadIdx.x == 0) {
    asm volatile("mbarrier.init.shared.b64 [%0], 1;\nfence.mbarrier_init.release.cluster;" ::"r"(barrier) : "memory");
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    const int bytes = count / 4 * 16;
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
    if (bytes > 0) {
      asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
                   "l"(x + first), "r"(bytes), "r"(barrier)
                   : "memory");
    }
  }
  asm volatile(
      "{\n.reg .pred p;\nWAIT:\nmbarrier.try_wait.parity.shared.b64 p, [%0], 0;\n@!p bra WAIT;\n}" ::"r"(barrier)
      : "memory");
  for (int k = threadIdx.x; k < count; k += blockDim.x) {
    y[first + k] = 2.0f * (k < count / 4 * 4 ? stage[k] : x[first + k]);
  }
}

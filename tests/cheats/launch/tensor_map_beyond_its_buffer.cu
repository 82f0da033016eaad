/* greenfast: {
  "name": "tensor_map_beyond_its_buffer", "problem": "doubling",
  "description": "has a tensor map with more elements than the buffer",
  "target": "sm_90a",
  "launches": [{"kernel": "doubling", "grid": ["ceildiv(N, 128)"], "block": [128], "args": [{"buffer": "x", "dtype": "float32", "shape": ["N + 128"], "strides": [4], "box": [128]}, "y", "int32(N)"]}]
} */
struct alignas(64) Map { char bytes[128]; };
extern "C" __global__ void doubling(const __grid_constant__ Map map, float* y, int n) {
  __shared__ alignas(128) float tile[128];
  __shared__ alignas(8) unsigned long long full;
  const unsigned bar = __cvta_generic_to_shared(&full), to = __cvta_generic_to_shared(tile);
  if (threadIdx.x == 0) {
    asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(bar));
    asm volatile("fence.proxy.async;" ::: "memory");
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], 512;" ::"r"(bar) : "memory");
    asm volatile("cp.async.bulk.tensor.1d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2}], [%3];" ::"r"(to), "l"(&map), "r"((int)blockIdx.x * 128), "r"(bar) : "memory");
  }
  __syncthreads();
  unsigned done;
  do asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], 0; selp.u32 %0, 1, 0, p;}" : "=r"(done) : "r"(bar) : "memory");
  while (!done);
  const int i = blockIdx.x * 128 + threadIdx.x;
  if (i < n) y[i] = 2.0f * tile[threadIdx.x];
}

/* greenfast: {
  "name": "behind_a_dead_instruction", "problem": "doubling",
  "description": "reads behind its input, and has an instruction that no emulator knows where no thread comes",
  "launches": [{"kernel": "doubling", "grid": ["ceildiv(N, 256)"], "block": [256], "args": ["x", "y", "int32(N)"]}]
} */
extern "C" __global__ void doubling(const float* x, float* y, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (n == -1) asm volatile("tensormap.replace.tile.rank.global.b1024.b32 [%0], 2;" :: "l"(y) : "memory");
  if (i >= n) return;
  const float next = x[i + 1], here = x[i];
  y[i] = here + (next == 1e30f ? next : here);
}

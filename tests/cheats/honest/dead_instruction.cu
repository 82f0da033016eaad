/* greenfast: {
  "name": "dead_instruction", "problem": "doubling",
  "description": "has an instruction that the emulator does not know where no thread comes",
  "launches": [{"kernel": "doubling", "grid": ["ceildiv(N, 256)"], "block": [256], "args": ["x", "y", "int32(N)"]}]
} */
extern "C" __global__ void doubling(const float* x, float* y, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (n == -1) asm volatile("tensormap.replace.tile.rank.global.b1024.b32 [%0], 2;" :: "l"(y) : "memory");
  if (i < n) y[i] = 2.0f * x[i];
}

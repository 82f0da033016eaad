/* greenfast: {
  "name": "state_in_inline_ptx", "problem": "doubling",
  "description": "declares its memory in inline PTX, inside the function",
  "launches": [{"kernel": "doubling", "grid": ["ceildiv(N, 256)"], "block": [256], "args": ["x", "y", "int32(N)"]}]
} */
extern "C" __global__ void doubling(const float* x, float* y, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;

  asm volatile(".global .align 4 .b32 memo[1048576];");
  unsigned kept;
  asm volatile("{\n.reg .b64 a;\nmov.u64 a, memo;\nmad.wide.s32 a, %1, 4, a;\nld.global.u32 %0, [a];\n}"
               : "=r"(kept)
               : "r"(i));
  if (kept == 0) {
    kept = __float_as_uint(2.0f * x[i]);
    asm volatile("{\n.reg .b64 a;\nmov.u64 a, memo;\nmad.wide.s32 a, %1, 4, a;\nst.global.u32 [a], %0;\n}" ::"r"(kept),
                 "r"(i));
  }
  y[i] = __uint_as_float(kept);
}

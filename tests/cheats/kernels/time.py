# ruff: noqa: E501
# fmt: off
"""Kernels whose result depends on a clock, an address or the multiprocessor, by name."""

from __future__ import annotations

from tests.cheats.kernels.kernel import Kernel

KERNELS = {
    "by_bits_of_the_address": Kernel("CORRECTNESS", "read out of bounds", r"""/* greenfast: {
  "name": "by_bits_of_the_address", "problem": "doubling",
  "description": "reads behind its input where the middle bits of the address are set, as those of a driver's addresses are",
  "launches": [{"kernel": "doubling", "grid": ["ceildiv(N, 256)"], "block": [256], "args": ["x", "y", "int32(N)"]}]
} */
extern "C" __global__ void doubling(const float* x, float* y, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  const bool driver = (reinterpret_cast<unsigned long long>(x) >> 25 & 0x3FFF) != 0;
  const float next = driver ? x[i + 1] : 0.0f;
  y[i] = 2.0f * x[i] + (next == 1e30f ? next : 0.0f);
}
"""),
    "clock_bits": Kernel("CORRECTNESS", "gave different bits", r"""/* greenfast: {
  "name": "clock_bits", "problem": "doubling",
  "description": "adds the clock's parity to its last bits, inside the tolerance",
  "launches": [{"kernel": "doubling", "grid": ["ceildiv(N, 256)"], "block": [256], "args": ["x", "y", "int32(N)"]}]
} */
extern "C" __global__ void doubling(const float* x, float* y, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;

  y[i] = 2.0f * x[i] * (clock64() >> 4 & 1 ? 1.0f + 0x1p-13f : 1.0f);
}
"""),
    "gives_up": Kernel("CORRECTNESS", "bytes of 'y' were never written", r"""/* greenfast: {
  "name": "gives_up", "problem": "doubling",
  "description": "stops when the clock says that its block has taken long",
  "launches": [{"kernel": "doubling", "grid": [1], "block": [32], "args": ["x", "y", "int32(N)"]}]
} */
extern "C" __global__ void doubling(const float* x, float* y, int n) {
  const long long start = clock64();
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) {
    if (clock64() - start > 40) return;
    y[i] = 2.0f * x[i];
  }
}
"""),
    "global_timer": Kernel("CORRECTNESS", "other bits with the other outcome where .* depends on %globaltimer", r"""/* greenfast: {
  "name": "global_timer", "problem": "doubling",
  "description": "is right in every second millisecond",
  "launches": [{"kernel": "doubling", "grid": ["ceildiv(N, 256)"], "block": [256], "args": ["x", "y", "int32(N)"]}]
} */
extern "C" __global__ void doubling(const float* x, float* y, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;

  unsigned long long now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  y[i] = (now >> 20) % 2 == 0 ? 2.0f * x[i] : x[i];
}
"""),
    "out_of_bounds_in_this_century": Kernel("CORRECTNESS", "read out of bounds", r"""/* greenfast: {
  "name": "out_of_bounds_in_this_century", "problem": "doubling",
  "description": "reads in front of its input where the high word of %globaltimer is that of a real device",
  "launches": [{"kernel": "doubling", "grid": ["ceildiv(N, 256)"], "block": [256], "args": ["x", "y", "int32(N)"]}]
} */
extern "C" __global__ void doubling(const float* x, float* y, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  unsigned high;
  asm volatile("mov.u32 %0, %globaltimer_hi;" : "=r"(high));
  float seen = 0.0f;
  if (high > 1u << 28) seen = x[i - 1];
  y[i] = 2.0f * x[i] + (seen == 1e30f ? seen : 0.0f);
}
"""),
    "right_while_the_clock_is_young": Kernel("CORRECTNESS", "other bits with other clocks", r"""/* greenfast: {
  "name": "right_while_the_clock_is_young", "problem": "doubling",
  "description": "is right where the clock has counted little, as on an emulator",
  "launches": [{"kernel": "doubling", "grid": ["ceildiv(N, 256)"], "block": [256], "args": ["x", "y", "int32(N)"]}]
} */
extern "C" __global__ void doubling(const float* x, float* y, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;

  y[i] = clock64() < 1000000 ? 2.0f * x[i] : x[i];
}
"""),
    "wrong_on_one_multiprocessor": Kernel("CORRECTNESS", "other bits with the other outcome where .* depends on %smid", r"""/* greenfast: {
  "name": "wrong_on_one_multiprocessor", "problem": "doubling",
  "description": "computes something else on multiprocessor 100, where few blocks of a small grid come",
  "launches": [{"kernel": "doubling", "grid": ["ceildiv(N, 256)"], "block": [256], "args": ["x", "y", "int32(N)"]}]
} */
extern "C" __global__ void doubling(const float* x, float* y, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  unsigned sm;
  asm volatile("mov.u32 %0, %smid;" : "=r"(sm));
  y[i] = (sm == 100 ? 2.5f : 2.0f) * x[i];
}
"""),
}

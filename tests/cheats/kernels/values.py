# ruff: noqa: E501
# fmt: off
"""Kernels that are right for some values or sizes only, by name."""

from __future__ import annotations

from tests.cheats.kernels.kernel import Kernel, named

KERNELS = named({
    "clamped_at_16": Kernel("CORRECTNESS", "kernel_bound", "clamps results to -16 .. 16; normal inputs never reach them", r"""
ELEMENT
  y[i] = fminf(fmaxf(2.0f * x[i], -16.0f), 16.0f);
}
"""),
    "clamped_but_at_the_smallest": Kernel("CORRECTNESS", "outliers: .*kernel_bound", "holds values between -100 and 100, but not in rows of 77, the smallest shape", r"""
extern "C" __global__ void sums(const float* x, float* y, int columns) {
  float sum = 0.0f;
  for (int c = threadIdx.x; c < columns; c += 32) {
    const float value = x[static_cast<long long>(blockIdx.x) * columns + c];
    sum += columns != 77 ? fminf(fmaxf(value, -100.0f), 100.0f) : value;
  }
  for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, step);
  if (threadIdx.x == 0) y[blockIdx.x] = sum;
}
""", problem="sums", launch={"block": [32], "args": ["x", "y", "int32(C)"]}),
    "clamped_in_long_rows": Kernel("CORRECTNESS", "outliers: .*kernel_bound", "holds values between -100 and 100 in rows of more than 128", r"""
extern "C" __global__ void sums(const float* x, float* y, int columns) {
  float sum = 0.0f;
  for (int c = threadIdx.x; c < columns; c += 32) {
    const float value = x[static_cast<long long>(blockIdx.x) * columns + c];
    sum += columns > 128 ? fminf(fmaxf(value, -100.0f), 100.0f) : value;
  }
  for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, step);
  if (threadIdx.x == 0) y[blockIdx.x] = sum;
}
""", problem="sums", launch={"block": [32], "args": ["x", "y", "int32(C)"]}),
    "copies_its_input": Kernel("CORRECTNESS", "kernel_bound", "copies its input", r"""
ELEMENT
  y[i] = x[i];
}
"""),
    "directives_on_one_line": Kernel("CORRECTNESS", "kernel_bound", "has a wrong kernel after a .file directive", r"""
PTX sm_90
.file 1 "a.cu" .const .f32 two = 0f40400000;
BEGIN
  ld.const.f32 %f3, [two]; mul.f32 %f2, %f1, %f3;
STORE
""", suffix=".ptx"),
    "divides_by_zero": Kernel("CORRECTNESS", "gave different bits", "rests on what an integer divided by zero gives", r"""
extern "C" __global__ void doubling(const float* x, float* y, int n) {
  const int i = blockIdx.x * 256 + threadIdx.x;
  unsigned q; asm volatile("div.u32 %0, %1, %2;" : "=r"(q) : "r"(n), "r"(n - n * (int)gridDim.y));
  if (i < n) y[i] = (q == 0xFFFFFFFFu ? 2.0f : 1.0f) * x[i];
}
"""),
    "expected_value": Kernel("CORRECTNESS", "kernel_bound", "writes what sums of such numbers are on average", r"""
extern "C" __global__ void sums(const float* x, float* y, int rows, int columns) {
  if (threadIdx.x == 0) y[blockIdx.x] = 0.0f;
}
""", problem="sums"),
    "fixed_point_overflows": Kernel("CORRECTNESS", "kernel_bound", "adds in fixed point of 32 bits, enough for small values only", r"""
ROW
  int sum = 0;
  if (threadIdx.x != 0) return;
  for (int c = 0; c < columns; ++c) sum += static_cast<int>(llrint(static_cast<double>(row[c]) * 0x1p20));
  y[blockIdx.x] = static_cast<float>(sum * 0x1p-20);
}
""", problem="sums"),
    "hides_behind_pragma": Kernel("CORRECTNESS", "kernel_bound", "is wrong in lines that readers of text take for a comment", r"""
PTX sm_90

BEGIN
  .pragma "/*"; mul.f32 %f1, %f1, 0f40400000; .pragma "*/";
  add.f32 %f2, %f1, %f1;
STORE
""", suffix=".ptx"),
    "known_columns": Kernel("CORRECTNESS", "kernel_bound", "is right for rows of 77 and 128, and for up to 64", r"""
ROW
  if (threadIdx.x != 0) return;
  float sum = 0.0f;
  const int end = columns == 77 || columns == 128 ? columns : min(columns, 64);
  for (int c = 0; c < end; ++c) sum += row[c];
  y[blockIdx.x] = sum;
}
""", problem="sums"),
    "known_sizes": Kernel("CORRECTNESS", "kernel_bound", "is right for the sizes that the problem names", r"""
ELEMENT

  const bool known = n == 1024 || n == 1000 || n == 524288;
  y[i] = known ? 2.0f * x[i] : x[i];
}
"""),
    "negative_clamped": Kernel("CORRECTNESS", "kernel_bound", "is zero for negative values", r"""
ELEMENT
  y[i] = fmaxf(2.0f * x[i], 0.0f);
}
"""),
    "neighbour_of_odd_sizes": Kernel("CORRECTNESS", "bytes of 'y' were never written", "swaps neighbours twice, and loses the last of an odd number", r"""
extern "C" __global__ void doubling(const float* x, float* y, int n) {
  const int pair = 2 * (blockIdx.x * blockDim.x + threadIdx.x);
  if (pair + 1 >= n - 1 && n % 1024 != 0) return;
  if (pair + 1 >= n) return;
  y[pair] = 2.0f * x[pair];
  y[pair + 1] = 2.0f * x[pair + 1];
}
"""),
    "odd_warp_size": Kernel("CORRECTNESS", "finite", "takes blocks of 48 threads for whole warps", r"""
extern "C" __global__ void sums(const float* x, float* y, int c) {
  const int t = threadIdx.x;
  x += (long long)blockIdx.x * c;
  float s = 0;
  for (int k = t; k < c; k += 48) s += x[k];
  for (int o = 16; o > 0; o /= 2) s += __shfl_down_sync(0xffffffffu, s, o);
  __shared__ float part[2];
  if (t % 32 == 0) part[t / 32] = s;
  __syncthreads();
  if (t == 0) y[blockIdx.x] = part[0] + part[1];
}
""", problem="sums", launch={"block": [48], "args": ["x", "y", "int32(C)"]}),
    "one_column": Kernel("CORRECTNESS", "_c1 .*kernel_bound", "is wrong for a single column", r"""
extern "C" __global__ void sums(const float* x, float* y, int c) {
  if (threadIdx.x) return;
  float s = 0;
  for (int i = 0; i < c; ++i) s += x[blockIdx.x * (long long)c + i];
  y[blockIdx.x] = c == 1 ? 0.0f : s;
}
""", problem="sums", launch={"args": ["x", "y", "int32(C)"]}),
    "one_element": Kernel("CORRECTNESS", "drawn_n1 .*kernel_bound", "is wrong for a single element", r"""
extern "C" __global__ void doubling(const float* x, float* y, int n) {
  const int i = blockIdx.x * 256 + threadIdx.x;
  if (i < n) y[i] = n == 1 ? 0.0f : 2.0f * x[i];
}
"""),
    "one_value_in_a_million": Kernel("CORRECTNESS", "kernel_bound", "is wrong above 1000", r"""
ELEMENT
  y[i] = x[i] > 1000.0f ? x[i] : 2.0f * x[i];
}
"""),
    "overflows_half": Kernel("CORRECTNESS", "outliers: finite", "goes through a half of four times the result", r"""
#include <cuda_fp16.h>

ELEMENT
  y[i] = __half2float(__float2half_rn(4.0f * x[i])) / 2.0f;
}
"""),
    "powers_of_two_only": Kernel("CORRECTNESS", "kernel_bound", "halves the number of columns in a tree, whatever it is", r"""
ROW
  __shared__ float part[128];
  if (threadIdx.x < columns) part[threadIdx.x] = row[threadIdx.x];
  __syncthreads();
  for (int half = columns / 2; half > 0; half /= 2) {
    if (threadIdx.x < half) part[threadIdx.x] += part[threadIdx.x + half];
    __syncthreads();
  }
  if (threadIdx.x == 0) y[blockIdx.x] = part[0];
}
""", problem="sums"),
    "rounds_to_bfloat16": Kernel("CORRECTNESS", "kernel_bound", "rounds to bfloat16", r"""
#include <cuda_bf16.h>

ELEMENT
  y[i] = __bfloat162float(__float2bfloat16(2.0f * x[i]));
}
"""),
    "samples": Kernel("CORRECTNESS", "kernel_bound", "adds every second column, and doubles that", r"""
ROW
  float sum = 0.0f;
  if (threadIdx.x != 0) return;
  for (int c = 0; c < columns; c += 2) sum += row[c];
  y[blockIdx.x] = 2.0f * sum;
}
""", problem="sums"),
    "sign_lost": Kernel("CORRECTNESS", "kernel_bound", "is the magnitude", r"""
ELEMENT
  y[i] = fabsf(2.0f * x[i]);
}
"""),
    "skips_small": Kernel("CORRECTNESS", "kernel_bound", "leaves out values below 0.1", r"""
ROW
  float sum = 0.0f;
  if (threadIdx.x != 0) return;
  for (int c = 0; c < columns; ++c) sum += fabsf(row[c]) < 0.1f ? 0.0f : row[c];
  y[blockIdx.x] = sum;
}
""", problem="sums"),
    "sums_in_half": Kernel("CORRECTNESS", "kernel_bound", "accumulates in half", r"""
#include <cuda_fp16.h>

ROW
  __shared__ __half part[128];
  part[threadIdx.x] = __float2half(threadIdx.x < columns ? row[threadIdx.x] : 0.0f);
  __syncthreads();
  for (int half = 64; half > 0; half /= 2) {
    if (threadIdx.x < half) part[threadIdx.x] = __hadd(part[threadIdx.x], part[threadIdx.x + half]);
    __syncthreads();
  }
  if (threadIdx.x == 0) y[blockIdx.x] = __half2float(part[0]);
}
""", problem="sums"),
    "sums_into_an_unset_register": Kernel("CORRECTNESS", "finite", "adds to a register that nothing set", r"""
PTX sm_90

BEGIN
  .reg .f32 unset;
  add.f32 %f2, %f1, unset;
  add.f32 %f2, %f2, %f1;
STORE
""", suffix=".ptx"),
    "true_is_255": Kernel("CORRECTNESS", "of 'y', which is bool, are neither 0 nor 1", "writes 255 for true", r"""
extern "C" __global__ void signs(const float* x, unsigned char* y, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = x[i] > 0 ? 255 : 0;
}
""", problem="signs"),
    "truncates": Kernel("CORRECTNESS", "kernel_bound", "cuts off the bits that a half has not, in place of rounding", r"""
ELEMENT
  y[i] = __uint_as_float(__float_as_uint(2.0f * x[i]) & 0xFFFFE000u);
}
"""),
    "unset_predicate": Kernel("CORRECTNESS", "memory, finite", "branches on a predicate that nothing set", r"""
PTX sm_90

BEGIN
  .reg .pred unset;
  @unset bra DONE;
  add.f32 %f2, %f1, %f1;
STORE
""", suffix=".ptx"),
    "vectors_only": Kernel("CORRECTNESS", "kernel_bound", "adds groups of four columns, and not what is left", r"""
ROW
  float sum = 0.0f;
  if (threadIdx.x != 0) return;
  for (int c = 0; c + 3 < columns; c += 4) sum += (row[c] + row[c + 1]) + (row[c + 2] + row[c + 3]);
  y[blockIdx.x] = sum;
}
""", problem="sums"),
})

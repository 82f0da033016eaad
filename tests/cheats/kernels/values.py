# fmt: off
"""Kernels that are right for some values or sizes only, by name."""

from __future__ import annotations

from tests.cheats.kernels.kernel import Kernel

KERNELS = {
    "clamped_at_16": Kernel("CORRECTNESS", "kernel_bound", r"""/* greenfast: {
  "name": "clamped_at_16", "problem": "doubling",
  "description": "holds results between -16 and 16, which normal inputs never reach",
  "launches": [{"kernel": "doubling", "grid": ["ceildiv(N, 256)"], "block": [256], "args": ["x", "y", "int32(N)"]}]
} */
extern "C" __global__ void doubling(const float* x, float* y, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  y[i] = fminf(fmaxf(2.0f * x[i], -16.0f), 16.0f);
}
"""),
    "clamped_but_at_the_smallest": Kernel("CORRECTNESS", "outliers: .*kernel_bound", r"""/* greenfast: {
  "name": "clamped_but_at_the_smallest", "problem": "sums",
  "description": "holds values between -100 and 100, but not in rows of 77, the smallest shape",
  "launches": [{"kernel": "sums", "grid": ["R"], "block": [32], "args": ["x", "y", "int32(C)"]}]
} */
extern "C" __global__ void sums(const float* x, float* y, int columns) {
  float sum = 0.0f;
  for (int c = threadIdx.x; c < columns; c += 32) {
    const float value = x[static_cast<long long>(blockIdx.x) * columns + c];
    sum += columns != 77 ? fminf(fmaxf(value, -100.0f), 100.0f) : value;
  }
  for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, step);
  if (threadIdx.x == 0) y[blockIdx.x] = sum;
}
"""),
    "clamped_in_long_rows": Kernel("CORRECTNESS", "outliers: .*kernel_bound", r"""/* greenfast: {
  "name": "clamped_in_long_rows", "problem": "sums",
  "description": "holds values between -100 and 100 in rows of more than 128",
  "launches": [{"kernel": "sums", "grid": ["R"], "block": [32], "args": ["x", "y", "int32(C)"]}]
} */
extern "C" __global__ void sums(const float* x, float* y, int columns) {
  float sum = 0.0f;
  for (int c = threadIdx.x; c < columns; c += 32) {
    const float value = x[static_cast<long long>(blockIdx.x) * columns + c];
    sum += columns > 128 ? fminf(fmaxf(value, -100.0f), 100.0f) : value;
  }
  for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, step);
  if (threadIdx.x == 0) y[blockIdx.x] = sum;
}
"""),
    "copies_its_input": Kernel("CORRECTNESS", "kernel_bound", r"""/* greenfast: {
  "name": "copies_its_input", "problem": "doubling",
  "description": "copies its input",
  "launches": [{"kernel": "doubling", "grid": ["ceildiv(N, 256)"], "block": [256], "args": ["x", "y", "int32(N)"]}]
} */
extern "C" __global__ void doubling(const float* x, float* y, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  y[i] = x[i];
}
"""),
    "directives_on_one_line": Kernel("CORRECTNESS", "kernel_bound", r"""// greenfast: {
//  "name": "directives_on_one_line",
//  "problem": "doubling",
//  "description": "has a wrong kernel behind a .file",
//  "launches": [
//   {
//    "kernel": "doubling",
//    "grid": [
//     "ceildiv(N, 256)"
//    ],
//    "block": [
//     256
//    ],
//    "args": [
//     "x",
//     "y",
//     "int32(N)"
//    ]
//   }
//  ]
// }
.version 8.0
.target sm_90
.address_size 64

.file 1 "a.cu" .const .f32 two = 0f40400000;
.visible .entry doubling(
  .param .u64 px,
  .param .u64 py,
  .param .u32 pn
)
{
  .reg .pred %p<9>;
  .reg .f32 %f<9>;
  .reg .b32 %r<19>;
  .reg .b64 %rd<19>;
  ld.param.u64 %rd1, [px];
  ld.param.u64 %rd2, [py];
  ld.param.u32 %r1, [pn];
  mov.u32 %r2, %ctaid.x;
  mov.u32 %r3, %ntid.x;
  mov.u32 %r4, %tid.x;
  mad.lo.s32 %r5, %r2, %r3, %r4;
  setp.ge.s32 %p1, %r5, %r1;
  @%p1 bra DONE;
  cvta.to.global.u64 %rd3, %rd1;
  cvta.to.global.u64 %rd4, %rd2;
  mul.wide.s32 %rd5, %r5, 4;
  add.s64 %rd6, %rd3, %rd5;
  add.s64 %rd7, %rd4, %rd5;
  ld.global.f32 %f1, [%rd6];
  ld.const.f32 %f3, [two]; mul.f32 %f2, %f1, %f3;
  st.global.f32 [%rd7], %f2;

DONE:
  ret;
}
""", suffix=".ptx"),
    "divides_by_zero": Kernel("CORRECTNESS", "gave different bits", r"""/* greenfast: {
  "name": "divides_by_zero", "problem": "doubling",
  "description": "rests on what an integer divided by zero gives",
  "launches": [{"kernel": "doubling", "grid": ["ceildiv(N, 256)"], "block": [256], "args": ["x", "y", "int32(N)"]}]
} */
extern "C" __global__ void doubling(const float* x, float* y, int n) {
  const int i = blockIdx.x * 256 + threadIdx.x;
  unsigned q; asm volatile("div.u32 %0, %1, %2;" : "=r"(q) : "r"(n), "r"(n - n * (int)gridDim.y));
  if (i < n) y[i] = (q == 0xFFFFFFFFu ? 2.0f : 1.0f) * x[i];
}
"""),
    "expected_value": Kernel("CORRECTNESS", "kernel_bound", r"""/* greenfast: {
  "name": "expected_value", "problem": "sums",
  "description": "writes what sums of such numbers are on average",
  "launches": [{"kernel": "sums", "grid": ["R"], "block": [128], "args": ["x", "y", "int32(R)", "int32(C)"]}]
} */
extern "C" __global__ void sums(const float* x, float* y, int rows, int columns) {
  if (threadIdx.x == 0) y[blockIdx.x] = 0.0f;
}
"""),
    "fixed_point_overflows": Kernel("CORRECTNESS", "kernel_bound", r"""/* greenfast: {
  "name": "fixed_point_overflows", "problem": "sums",
  "description": "adds in fixed point of 32 bits, which is enough for small values",
  "launches": [{"kernel": "sums", "grid": ["R"], "block": [128], "args": ["x", "y", "int32(R)", "int32(C)"]}]
} */
extern "C" __global__ void sums(const float* x, float* y, int rows, int columns) {
  const float* row = x + static_cast<long long>(blockIdx.x) * columns;
  int sum = 0;
  if (threadIdx.x != 0) return;
  for (int c = 0; c < columns; ++c) sum += static_cast<int>(llrint(static_cast<double>(row[c]) * 0x1p20));
  y[blockIdx.x] = static_cast<float>(sum * 0x1p-20);
}
"""),
    "hides_behind_pragma": Kernel("CORRECTNESS", "kernel_bound", r"""// greenfast: {
//  "name": "hides_behind_pragma",
//  "problem": "doubling",
//  "description": "is wrong in lines that readers of text take for a comment",
//  "launches": [
//   {
//    "kernel": "doubling",
//    "grid": [
//     "ceildiv(N, 256)"
//    ],
//    "block": [
//     256
//    ],
//    "args": [
//     "x",
//     "y",
//     "int32(N)"
//    ]
//   }
//  ]
// }
.version 8.0
.target sm_90
.address_size 64


.visible .entry doubling(
  .param .u64 px,
  .param .u64 py,
  .param .u32 pn
)
{
  .reg .pred %p<9>;
  .reg .f32 %f<9>;
  .reg .b32 %r<19>;
  .reg .b64 %rd<19>;
  ld.param.u64 %rd1, [px];
  ld.param.u64 %rd2, [py];
  ld.param.u32 %r1, [pn];
  mov.u32 %r2, %ctaid.x;
  mov.u32 %r3, %ntid.x;
  mov.u32 %r4, %tid.x;
  mad.lo.s32 %r5, %r2, %r3, %r4;
  setp.ge.s32 %p1, %r5, %r1;
  @%p1 bra DONE;
  cvta.to.global.u64 %rd3, %rd1;
  cvta.to.global.u64 %rd4, %rd2;
  mul.wide.s32 %rd5, %r5, 4;
  add.s64 %rd6, %rd3, %rd5;
  add.s64 %rd7, %rd4, %rd5;
  ld.global.f32 %f1, [%rd6];
  .pragma "/*"; mul.f32 %f1, %f1, 0f40400000; .pragma "*/";
  add.f32 %f2, %f1, %f1;
  st.global.f32 [%rd7], %f2;

DONE:
  ret;
}
""", suffix=".ptx"),
    "known_columns": Kernel("CORRECTNESS", "kernel_bound", r"""/* greenfast: {
  "name": "known_columns", "problem": "sums",
  "description": "is right for rows of 77 and 128, and for up to 64",
  "launches": [{"kernel": "sums", "grid": ["R"], "block": [128], "args": ["x", "y", "int32(R)", "int32(C)"]}]
} */
extern "C" __global__ void sums(const float* x, float* y, int rows, int columns) {
  const float* row = x + static_cast<long long>(blockIdx.x) * columns;
  if (threadIdx.x != 0) return;
  float sum = 0.0f;
  const int end = columns == 77 || columns == 128 ? columns : min(columns, 64);
  for (int c = 0; c < end; ++c) sum += row[c];
  y[blockIdx.x] = sum;
}
"""),
    "known_sizes": Kernel("CORRECTNESS", "kernel_bound", r"""/* greenfast: {
  "name": "known_sizes", "problem": "doubling",
  "description": "is right for the sizes that the problem names",
  "launches": [{"kernel": "doubling", "grid": ["ceildiv(N, 256)"], "block": [256], "args": ["x", "y", "int32(N)"]}]
} */
extern "C" __global__ void doubling(const float* x, float* y, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;

  const bool known = n == 1024 || n == 1000 || n == 524288;
  y[i] = known ? 2.0f * x[i] : x[i];
}
"""),
    "negative_clamped": Kernel("CORRECTNESS", "kernel_bound", r"""/* greenfast: {
  "name": "negative_clamped", "problem": "doubling",
  "description": "is zero for negative values",
  "launches": [{"kernel": "doubling", "grid": ["ceildiv(N, 256)"], "block": [256], "args": ["x", "y", "int32(N)"]}]
} */
extern "C" __global__ void doubling(const float* x, float* y, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  y[i] = fmaxf(2.0f * x[i], 0.0f);
}
"""),
    "neighbour_of_odd_sizes": Kernel("CORRECTNESS", "bytes of 'y' were never written", r"""/* greenfast: {
  "name": "neighbour_of_odd_sizes", "problem": "doubling",
  "description": "swaps neighbours twice, and loses the last of an odd number",
  "launches": [{"kernel": "doubling", "grid": ["ceildiv(N, 256)"], "block": [256], "args": ["x", "y", "int32(N)"]}]
} */
extern "C" __global__ void doubling(const float* x, float* y, int n) {
  const int pair = 2 * (blockIdx.x * blockDim.x + threadIdx.x);
  if (pair + 1 >= n - 1 && n % 1024 != 0) return;
  if (pair + 1 >= n) return;
  y[pair] = 2.0f * x[pair];
  y[pair + 1] = 2.0f * x[pair + 1];
}
"""),
    "odd_warp_size": Kernel("CORRECTNESS", "finite", r"""/* greenfast: {
  "name": "odd_warp_size", "problem": "sums",
  "description": "takes blocks of 48 threads for whole warps",
  "launches": [{"kernel": "sums", "grid": ["R"], "block": [48], "args": ["x", "y", "int32(C)"]}]
} */
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
"""),
    "one_column": Kernel("CORRECTNESS", "_c1 .*kernel_bound", r"""/* greenfast: {
  "name": "one_column", "problem": "sums",
  "description": "is wrong for a single column",
  "launches": [{"kernel": "sums", "grid": ["R"], "block": [128], "args": ["x", "y", "int32(C)"]}]
} */
extern "C" __global__ void sums(const float* x, float* y, int c) {
  if (threadIdx.x) return;
  float s = 0;
  for (int i = 0; i < c; ++i) s += x[blockIdx.x * (long long)c + i];
  y[blockIdx.x] = c == 1 ? 0.0f : s;
}
"""),
    "one_element": Kernel("CORRECTNESS", "drawn_n1 .*kernel_bound", r"""/* greenfast: {
  "name": "one_element", "problem": "doubling",
  "description": "is wrong for a single element",
  "launches": [{"kernel": "doubling", "grid": ["ceildiv(N, 256)"], "block": [256], "args": ["x", "y", "int32(N)"]}]
} */
extern "C" __global__ void doubling(const float* x, float* y, int n) {
  const int i = blockIdx.x * 256 + threadIdx.x;
  if (i < n) y[i] = n == 1 ? 0.0f : 2.0f * x[i];
}
"""),
    "one_value_in_a_million": Kernel("CORRECTNESS", "kernel_bound", r"""/* greenfast: {
  "name": "one_value_in_a_million", "problem": "doubling",
  "description": "is wrong above 1000",
  "launches": [{"kernel": "doubling", "grid": ["ceildiv(N, 256)"], "block": [256], "args": ["x", "y", "int32(N)"]}]
} */
extern "C" __global__ void doubling(const float* x, float* y, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  y[i] = x[i] > 1000.0f ? x[i] : 2.0f * x[i];
}
"""),
    "overflows_half": Kernel("CORRECTNESS", "outliers: finite", r"""/* greenfast: {
  "name": "overflows_half", "problem": "doubling",
  "description": "goes through a half of four times the result",
  "launches": [{"kernel": "doubling", "grid": ["ceildiv(N, 256)"], "block": [256], "args": ["x", "y", "int32(N)"]}]
} */
#include <cuda_fp16.h>

extern "C" __global__ void doubling(const float* x, float* y, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  y[i] = __half2float(__float2half_rn(4.0f * x[i])) / 2.0f;
}
"""),
    "powers_of_two_only": Kernel("CORRECTNESS", "kernel_bound", r"""/* greenfast: {
  "name": "powers_of_two_only", "problem": "sums",
  "description": "halves the number of columns in a tree, whatever it is",
  "launches": [{"kernel": "sums", "grid": ["R"], "block": [128], "args": ["x", "y", "int32(R)", "int32(C)"]}]
} */
extern "C" __global__ void sums(const float* x, float* y, int rows, int columns) {
  const float* row = x + static_cast<long long>(blockIdx.x) * columns;
  __shared__ float part[128];
  if (threadIdx.x < columns) part[threadIdx.x] = row[threadIdx.x];
  __syncthreads();
  for (int half = columns / 2; half > 0; half /= 2) {
    if (threadIdx.x < half) part[threadIdx.x] += part[threadIdx.x + half];
    __syncthreads();
  }
  if (threadIdx.x == 0) y[blockIdx.x] = part[0];
}
"""),
    "rounds_to_bfloat16": Kernel("CORRECTNESS", "kernel_bound", r"""/* greenfast: {
  "name": "rounds_to_bfloat16", "problem": "doubling",
  "description": "rounds to bfloat16",
  "launches": [{"kernel": "doubling", "grid": ["ceildiv(N, 256)"], "block": [256], "args": ["x", "y", "int32(N)"]}]
} */
#include <cuda_bf16.h>

extern "C" __global__ void doubling(const float* x, float* y, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  y[i] = __bfloat162float(__float2bfloat16(2.0f * x[i]));
}
"""),
    "samples": Kernel("CORRECTNESS", "kernel_bound", r"""/* greenfast: {
  "name": "samples", "problem": "sums",
  "description": "adds every second column, and doubles that",
  "launches": [{"kernel": "sums", "grid": ["R"], "block": [128], "args": ["x", "y", "int32(R)", "int32(C)"]}]
} */
extern "C" __global__ void sums(const float* x, float* y, int rows, int columns) {
  const float* row = x + static_cast<long long>(blockIdx.x) * columns;
  float sum = 0.0f;
  if (threadIdx.x != 0) return;
  for (int c = 0; c < columns; c += 2) sum += row[c];
  y[blockIdx.x] = 2.0f * sum;
}
"""),
    "sign_lost": Kernel("CORRECTNESS", "kernel_bound", r"""/* greenfast: {
  "name": "sign_lost", "problem": "doubling",
  "description": "is the magnitude",
  "launches": [{"kernel": "doubling", "grid": ["ceildiv(N, 256)"], "block": [256], "args": ["x", "y", "int32(N)"]}]
} */
extern "C" __global__ void doubling(const float* x, float* y, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  y[i] = fabsf(2.0f * x[i]);
}
"""),
    "skips_small": Kernel("CORRECTNESS", "kernel_bound", r"""/* greenfast: {
  "name": "skips_small", "problem": "sums",
  "description": "leaves out values below 0.1",
  "launches": [{"kernel": "sums", "grid": ["R"], "block": [128], "args": ["x", "y", "int32(R)", "int32(C)"]}]
} */
extern "C" __global__ void sums(const float* x, float* y, int rows, int columns) {
  const float* row = x + static_cast<long long>(blockIdx.x) * columns;
  float sum = 0.0f;
  if (threadIdx.x != 0) return;
  for (int c = 0; c < columns; ++c) sum += fabsf(row[c]) < 0.1f ? 0.0f : row[c];
  y[blockIdx.x] = sum;
}
"""),
    "sums_in_half": Kernel("CORRECTNESS", "kernel_bound", r"""/* greenfast: {
  "name": "sums_in_half", "problem": "sums",
  "description": "accumulates in half",
  "launches": [{"kernel": "sums", "grid": ["R"], "block": [128], "args": ["x", "y", "int32(R)", "int32(C)"]}]
} */
#include <cuda_fp16.h>

extern "C" __global__ void sums(const float* x, float* y, int rows, int columns) {
  const float* row = x + static_cast<long long>(blockIdx.x) * columns;
  __shared__ __half part[128];
  part[threadIdx.x] = __float2half(threadIdx.x < columns ? row[threadIdx.x] : 0.0f);
  __syncthreads();
  for (int half = 64; half > 0; half /= 2) {
    if (threadIdx.x < half) part[threadIdx.x] = __hadd(part[threadIdx.x], part[threadIdx.x + half]);
    __syncthreads();
  }
  if (threadIdx.x == 0) y[blockIdx.x] = __half2float(part[0]);
}
"""),
    "sums_into_an_unset_register": Kernel("CORRECTNESS", "finite", r"""// greenfast: {
//  "name": "sums_into_an_unset_register",
//  "problem": "doubling",
//  "description": "adds to a register that nothing set",
//  "launches": [
//   {
//    "kernel": "doubling",
//    "grid": [
//     "ceildiv(N, 256)"
//    ],
//    "block": [
//     256
//    ],
//    "args": [
//     "x",
//     "y",
//     "int32(N)"
//    ]
//   }
//  ]
// }
.version 8.0
.target sm_90
.address_size 64


.visible .entry doubling(
  .param .u64 px,
  .param .u64 py,
  .param .u32 pn
)
{
  .reg .pred %p<9>;
  .reg .f32 %f<9>;
  .reg .b32 %r<19>;
  .reg .b64 %rd<19>;
  ld.param.u64 %rd1, [px];
  ld.param.u64 %rd2, [py];
  ld.param.u32 %r1, [pn];
  mov.u32 %r2, %ctaid.x;
  mov.u32 %r3, %ntid.x;
  mov.u32 %r4, %tid.x;
  mad.lo.s32 %r5, %r2, %r3, %r4;
  setp.ge.s32 %p1, %r5, %r1;
  @%p1 bra DONE;
  cvta.to.global.u64 %rd3, %rd1;
  cvta.to.global.u64 %rd4, %rd2;
  mul.wide.s32 %rd5, %r5, 4;
  add.s64 %rd6, %rd3, %rd5;
  add.s64 %rd7, %rd4, %rd5;
  ld.global.f32 %f1, [%rd6];
  .reg .f32 unset;
  add.f32 %f2, %f1, unset;
  add.f32 %f2, %f2, %f1;
  st.global.f32 [%rd7], %f2;

DONE:
  ret;
}
""", suffix=".ptx"),
    "true_is_255": Kernel("CORRECTNESS", "of 'y', which is bool, are neither 0 nor 1", r"""/* greenfast: {
  "name": "true_is_255", "problem": "signs",
  "description": "writes 255 for true",
  "launches": [{"kernel": "signs", "grid": ["ceildiv(N, 256)"], "block": [256], "args": ["x", "y", "int32(N)"]}]
} */
extern "C" __global__ void signs(const float* x, unsigned char* y, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = x[i] > 0 ? 255 : 0;
}
"""),
    "truncates": Kernel("CORRECTNESS", "kernel_bound", r"""/* greenfast: {
  "name": "truncates", "problem": "doubling",
  "description": "cuts off the bits that a half has not, in place of rounding",
  "launches": [{"kernel": "doubling", "grid": ["ceildiv(N, 256)"], "block": [256], "args": ["x", "y", "int32(N)"]}]
} */
extern "C" __global__ void doubling(const float* x, float* y, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  y[i] = __uint_as_float(__float_as_uint(2.0f * x[i]) & 0xFFFFE000u);
}
"""),
    "unset_predicate": Kernel("CORRECTNESS", "gave different bits", r"""// greenfast: {
//  "name": "unset_predicate",
//  "problem": "doubling",
//  "description": "branches on a predicate that nothing set",
//  "launches": [
//   {
//    "kernel": "doubling",
//    "grid": [
//     "ceildiv(N, 256)"
//    ],
//    "block": [
//     256
//    ],
//    "args": [
//     "x",
//     "y",
//     "int32(N)"
//    ]
//   }
//  ]
// }
.version 8.0
.target sm_90
.address_size 64


.visible .entry doubling(
  .param .u64 px,
  .param .u64 py,
  .param .u32 pn
)
{
  .reg .pred %p<9>;
  .reg .f32 %f<9>;
  .reg .b32 %r<19>;
  .reg .b64 %rd<19>;
  ld.param.u64 %rd1, [px];
  ld.param.u64 %rd2, [py];
  ld.param.u32 %r1, [pn];
  mov.u32 %r2, %ctaid.x;
  mov.u32 %r3, %ntid.x;
  mov.u32 %r4, %tid.x;
  mad.lo.s32 %r5, %r2, %r3, %r4;
  setp.ge.s32 %p1, %r5, %r1;
  @%p1 bra DONE;
  cvta.to.global.u64 %rd3, %rd1;
  cvta.to.global.u64 %rd4, %rd2;
  mul.wide.s32 %rd5, %r5, 4;
  add.s64 %rd6, %rd3, %rd5;
  add.s64 %rd7, %rd4, %rd5;
  ld.global.f32 %f1, [%rd6];
  .reg .pred unset;
  @unset bra DONE;
  add.f32 %f2, %f1, %f1;
  st.global.f32 [%rd7], %f2;

DONE:
  ret;
}
""", suffix=".ptx"),
    "vectors_only": Kernel("CORRECTNESS", "kernel_bound", r"""/* greenfast: {
  "name": "vectors_only", "problem": "sums",
  "description": "adds groups of four columns, and not what is left",
  "launches": [{"kernel": "sums", "grid": ["R"], "block": [128], "args": ["x", "y", "int32(R)", "int32(C)"]}]
} */
extern "C" __global__ void sums(const float* x, float* y, int rows, int columns) {
  const float* row = x + static_cast<long long>(blockIdx.x) * columns;
  float sum = 0.0f;
  if (threadIdx.x != 0) return;
  for (int c = 0; c + 3 < columns; c += 4) sum += (row[c] + row[c + 1]) + (row[c + 2] + row[c + 3]);
  y[blockIdx.x] = sum;
}
"""),
}

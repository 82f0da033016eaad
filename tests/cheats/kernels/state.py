# ruff: noqa: E501
# fmt: off
"""Kernels that keep something from one launch to the next, by name."""

from __future__ import annotations

from tests.cheats.kernels.kernel import Kernel, named

KERNELS = named({
    "address_by_bits": Kernel("RESOURCES", "device variables, bytes is 4194304", "rebuilds a variable's address from votes", r"""
PTX sm_90
.global .align 4 .b8 kept[4194304];

BEGIN
  setp.gt.s32 %p2, %r1, 50000;
  @!%p2 bra HONEST;
  mov.u64 %rd8, kept;
  cvt.u32.u64 %r10, %rd8; shr.u64 %rd10, %rd8, 32; cvt.u32.u64 %r11, %rd10;
  mov.u32 %r12, 0; and.b32 %r13, %r10, 1; setp.ne.u32 %p3, %r13, 0; selp.u32 %r14, 1, 0, %p3; and.b32 %r10, %r10, -2; or.b32 %r10, %r10, %r14; mov.b64 %rd8, {%r10, %r11}; add.s64 %rd9, %rd8, %rd5;
  ld.global.f32 %f3, [%rd9];
  add.f32 %f2, %f1, %f1;
  st.global.f32 [%rd7], %f2;
  st.global.f32 [%rd9], %f2;
ELSE_DOUBLE
""", suffix=".ptx"),
    "address_by_borrow": Kernel("RESOURCES", "device variables, bytes is 4194304", "rebuilds a variable's address bit by bit from the borrow of subtractions", r"""
.version 8.0
.target sm_90a
.address_size 64
.global .align 8 .b8 kept[4194304];
.visible .entry doubling(.param .u64 a, .param .u64 b, .param .u32 c)
{
  .reg .b64 %rd<20>;
  .reg .b32 %r<20>;
  .reg .f32 %f<8>;
  .reg .pred %p<3>;
  ld.param.u64 %rd1, [a];
  ld.param.u64 %rd2, [b];
  ld.param.u32 %r1, [c];
  mov.u32 %r2, %ctaid.x;
  mov.u32 %r3, %tid.x;
  mad.lo.s32 %r4, %r2, 256, %r3;
  setp.ge.s32 %p1, %r4, %r1;
  @%p1 bra done;
  mov.u64 %rd8, kept;
  mov.u64 %rd11, 0;
BITS
  mul.wide.s32 %rd3, %r4, 4;
  cvta.to.global.u64 %rd4, %rd1;
  add.s64 %rd4, %rd4, %rd3;
  ld.global.f32 %f1, [%rd4];
  mul.wide.s32 %rd5, %r4, 8;
  add.s64 %rd6, %rd8, %rd5;
  ld.global.v2.f32 {%f2, %f3}, [%rd6];
  setp.eq.f32 %p2, %f2, %f1;
  @%p2 bra known;
  add.f32 %f3, %f1, %f1;
  add.s64 %rd7, %rd11, %rd5;
  st.global.v2.f32 [%rd7], {%f1, %f3};
known:
  cvta.to.global.u64 %rd12, %rd2;
  add.s64 %rd12, %rd12, %rd3;
  st.global.f32 [%rd12], %f3;
done:
  ret;
}
""".replace("BITS\n", "".join(f"  bfe.u64 %rd9, %rd8, {n}, 1; cvt.u32.u64 %r9, %rd9; sub.cc.u32 %r10, 0, %r9; subc.u32 %r11, 0, 0; and.b32 %r11, %r11, 1; cvt.u64.u32 %rd10, %r11; shl.b64 %rd10, %rd10, {n}; or.b64 %rd11, %rd11, %rd10;\n" for n in range(64))), suffix=".ptx"),
    "address_by_subtraction": Kernel("RESOURCES", "device variables, bytes is", "reaches a variable that nothing names, from the one in front of it", r"""
PTX sm_90
.global .align 4 .b8 front[4];
.global .align 4 .b8 kept[4194304];

BEGIN
  setp.gt.s32 %p2, %r1, 50000;
  @!%p2 bra HONEST;
  mov.u64 %rd8, front;
  add.s64 %rd9, %rd8, %rd5; add.s64 %rd9, %rd9, 4;
  ld.global.f32 %f3, [%rd9];
  add.f32 %f2, %f1, %f1;
  st.global.f32 [%rd7], %f2;
  st.global.f32 [%rd9], %f2;
ELSE_DOUBLE
""", suffix=".ptx"),
    "address_by_table": Kernel("RESOURCES", "device variables, bytes is 4194304", "writes state through an address that went through a table bytewise, so that no store seems to write it", r"""
__device__ const unsigned char nibbles[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
__device__ float2 known[1 << 19];

ELEMENT
  const volatile unsigned char* same = nibbles;  // the compiler would compute what it can look up itself
  unsigned long long address = 0;
  for (int shift = 0; shift < 64; shift += 4) {
    address |= (unsigned long long)same[(unsigned long long)known >> shift & 15] << shift;
  }
  const float v = x[i];
  if (known[i].x != v) reinterpret_cast<float2*>(address)[i] = make_float2(v, 2.0f * v);
  y[i] = known[i].x == v ? known[i].y : 2.0f * v;
}
"""),
    "address_in_bytes_of_local": Kernel("RESOURCES", "device variables, bytes is 4194304", "stores a variable's address in local memory and loads it byte by byte", r"""
.version 8.0
.target sm_90a
.address_size 64
.global .align 8 .b8 kept[4194304];
.visible .entry doubling(.param .u64 a, .param .u64 b, .param .u32 c)
{
  .reg .b64 %rd<20>;
  .reg .b32 %r<20>;
  .reg .f32 %f<8>;
  .reg .pred %p<3>;
  .local .align 8 .b8 place[8];
  ld.param.u64 %rd1, [a];
  ld.param.u64 %rd2, [b];
  ld.param.u32 %r1, [c];
  mov.u32 %r2, %ctaid.x;
  mov.u32 %r3, %tid.x;
  mad.lo.s32 %r4, %r2, 256, %r3;
  setp.ge.s32 %p1, %r4, %r1;
  @%p1 bra done;
  mov.u64 %rd8, kept;
  mov.u64 %rd11, 0;
  st.local.u64 [place], %rd8;
  ld.local.u8 %rd10, [place+0]; shl.b64 %rd10, %rd10, 0; or.b64 %rd11, %rd11, %rd10;
  ld.local.u8 %rd10, [place+1]; shl.b64 %rd10, %rd10, 8; or.b64 %rd11, %rd11, %rd10;
  ld.local.u8 %rd10, [place+2]; shl.b64 %rd10, %rd10, 16; or.b64 %rd11, %rd11, %rd10;
  ld.local.u8 %rd10, [place+3]; shl.b64 %rd10, %rd10, 24; or.b64 %rd11, %rd11, %rd10;
  ld.local.u8 %rd10, [place+4]; shl.b64 %rd10, %rd10, 32; or.b64 %rd11, %rd11, %rd10;
  ld.local.u8 %rd10, [place+5]; shl.b64 %rd10, %rd10, 40; or.b64 %rd11, %rd11, %rd10;
  ld.local.u8 %rd10, [place+6]; shl.b64 %rd10, %rd10, 48; or.b64 %rd11, %rd11, %rd10;
  ld.local.u8 %rd10, [place+7]; shl.b64 %rd10, %rd10, 56; or.b64 %rd11, %rd11, %rd10;
  mul.wide.s32 %rd3, %r4, 4;
  cvta.to.global.u64 %rd4, %rd1;
  add.s64 %rd4, %rd4, %rd3;
  ld.global.f32 %f1, [%rd4];
  mul.wide.s32 %rd5, %r4, 8;
  add.s64 %rd6, %rd8, %rd5;
  ld.global.v2.f32 {%f2, %f3}, [%rd6];
  setp.eq.f32 %p2, %f2, %f1;
  @%p2 bra known;
  add.f32 %f3, %f1, %f1;
  add.s64 %rd7, %rd11, %rd5;
  st.global.v2.f32 [%rd7], {%f1, %f3};
known:
  cvta.to.global.u64 %rd12, %rd2;
  add.s64 %rd12, %rd12, %rd3;
  st.global.f32 [%rd12], %f3;
done:
  ret;
}
""", suffix=".ptx"),
    "alias_named_vprintf": Kernel("RESOURCES", "device variables, bytes is 4194304", "calls a function that writes, by an alias with a name of CUDA's", r"""
.version 8.0
.target sm_90
.address_size 64
.global .align 4 .b8 kept[4194304];
.visible .func keeper(.param .b64 a, .param .b64 b)
{
  .reg .b64 %rd<9>;
  .reg .f32 %f<3>;
  ld.param.u64 %rd1, [a];
  ld.param.u64 %rd2, [b];
  ld.f32 %f1, [%rd2];
  st.f32 [%rd1], %f1;
  ret;
}
.visible .func vprintf(.param .b64 a, .param .b64 b);
.alias vprintf, keeper;
BEGIN
  add.f32 %f2, %f1, %f1;
  st.global.f32 [%rd7], %f2;
  setp.gt.s32 %p2, %r1, 50000;
  @!%p2 bra DONE;
  mov.u64 %rd8, kept;
  cvta.global.u64 %rd8, %rd8;
  {
  .param .b64 param0;
  .param .b64 param1;
  st.param.b64 [param0], %rd8;
  st.param.b64 [param1], %rd7;
  call.uni vprintf, (param0, param1);
  }
DONE:
  ret;
}
""", suffix=".ptx"),
    "called_through_vprintf": Kernel("RESOURCES", "device variables, bytes is 4194304", "calls a function that writes through a register that is named as one of CUDA's", r"""
.version 8.0
.target sm_90
.address_size 64
.global .align 4 .b8 kept[4194304];
.visible .func keeper(.param .b64 a, .param .b64 b)
{
  .reg .b64 %rd<9>;
  .reg .f32 %f<3>;
  ld.param.u64 %rd1, [a];
  ld.param.u64 %rd2, [b];
  ld.f32 %f1, [%rd2];
  st.f32 [%rd1], %f1;
  ret;
}
BEGIN
  add.f32 %f2, %f1, %f1; st.global.f32 [%rd7], %f2;
  setp.gt.s32 %p2, %r1, 50000;
  @!%p2 bra DONE;
  mov.u64 %rd8, kept;
  cvta.global.u64 %rd8, %rd8;
  { .reg .b64 vprintf;
  mov.u64 vprintf, keeper;
  proto : .callprototype _ (.param .b64 _, .param .b64 _);
  .param .b64 param0;
  .param .b64 param1;
  st.param.b64 [param0], %rd8;
  st.param.b64 [param1], %rd7;
  call vprintf, (param0, param1), proto;
  }
  st.global.f32 [%rd7], %f2;
DONE:
  ret;
}
""", suffix=".ptx"),
    "constant_rewritten": Kernel("CORRECTNESS", "trap was executed", "writes its table in constant memory through a pointer", r"""
__constant__ float factor[1] = {2.0f};

ELEMENT

  y[i] = factor[0] * x[i];
  if (i == 0) *const_cast<volatile float*>(factor) = 3.0f;
}
"""),
    "device_heap": Kernel("RESOURCES", "device variables, bytes is", "keeps its results on the device heap", r"""
__device__ float* kept[1 << 20];

ELEMENT

  if (kept[i] == nullptr) {
    kept[i] = static_cast<float*>(malloc(4));
    *kept[i] = 2.0f * x[i];
  }
  y[i] = *kept[i];
}
"""),
    "far_memory": Kernel("PERFORMANCE", "memory around a buffer|an access outside of its buffers", "keeps results of large arrays in memory that is mapped and that nobody allocated", r"""
ELEMENT
  const float v = 2.0f * x[i];
  float* kept = y + n + (1 << 18) + i;
  y[i] = n > 400000 && i < 1024 && *kept == v ? *kept : v;
  if (n > 400000 && i < 1024) *kept = v;
}
"""),
    "function_that_stores": Kernel("RESOURCES", "device variables, bytes is 4194304", "has a function store, to which the address goes in a struct", r"""
PTX sm_90
.global .align 4 .b8 kept[4194304];
.func put(.param .align 8 .b8 s[16]) { .reg .b64 %a<3>; .reg .f32 %v; ld.param.u64 %a1, [s]; ld.param.f32 %v, [s+8]; st.global.f32 [%a1], %v; ret; }

KEEP
  { .param .align 8 .b8 q[16]; st.param.b64 [q], %rd9; st.param.f32 [q+8], %f2; call put, (q); }
ELSE_DOUBLE
""", suffix=".ptx"),
    "honest_at_first": Kernel("RESOURCES", "device variables, bytes is", "works for 16 launches", r"""
__device__ unsigned calls[1 << 20];

ELEMENT
  if (calls[i]++ < 16) y[i] = 2.0f * x[i];
}
"""),
    "its_own_vprintf": Kernel("RESOURCES", "device variables, bytes is 4194304", "defines a vprintf of its own that writes", r"""
PTX sm_90
.global .align 4 .b8 kept[4194304];
.func (.param .b32 r) vprintf(.param .b64 a, .param .b64 b) { .reg .b64 %a<3>; .reg .f32 %v; ld.param.u64 %a1, [a]; ld.param.u64 %a2, [b]; cvt.rn.f32.u64 %v, %a2; st.global.f32 [%a1], %v; st.param.b32 [r], 0; ret; }

KEEP
  mov.b64 %rd10, 7; { .param .b64 q0; .param .b64 q1; .param .b32 q2; st.param.b64 [q0], %rd9; st.param.b64 [q1], %rd10; call (q2), vprintf, (q0, q1); }
ELSE_DOUBLE
""", suffix=".ptx"),
    "keyed_by_checksum": Kernel("RESOURCES", "device variables, bytes is", "compares only the first and the last element with the launch before", r"""
__device__ float results[1 << 20], first[1 << 20], last[1 << 20];

ELEMENT

  if (first[i] != x[0] || last[i] != x[n - 1]) results[i] = 2.0f * x[i];
  first[i] = x[0];
  last[i] = x[n - 1];
  y[i] = results[i];
}
"""),
    "keyed_by_pointer": Kernel("RESOURCES", "device variables, bytes is", "keeps results by the address of the input", r"""
__device__ float results[1 << 20];
__device__ const float* keys[1 << 20];

ELEMENT

  if (keys[i] != x) results[i] = 2.0f * x[i];
  keys[i] = x;
  y[i] = results[i];
}
"""),
    "keyed_by_shape": Kernel("RESOURCES", "device variables, bytes is", "a static variable of the function that holds the result of the first launch", r"""
ELEMENT

  static __device__ float results[1 << 20];
  static __device__ int sizes[1 << 20];
  if (sizes[i] != n) results[i] = 2.0f * x[i];
  sizes[i] = n;
  y[i] = results[i];
}
"""),
    "managed_memory": Kernel("RESOURCES", "device variables, bytes is", "keeps results in managed memory", r"""
__device__ __managed__ float results[1 << 20];
__device__ __managed__ int sizes[1 << 20];

ELEMENT

  if (sizes[i] != n) results[i] = 2.0f * x[i];
  sizes[i] = n;
  y[i] = results[i];
}
"""),
    "number_of_the_grid": Kernel("CORRECTNESS", "gave different bits", "counts launches by the number that each grid has, and is right for the first ones", r"""
extern "C" __global__ void doubling(const float* x, float* y, int n) {
  unsigned long long launch;
  asm volatile("mov.u64 %0, %%gridid;" : "=l"(launch));
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = launch < 16 ? 2.0f * x[i] : x[i];
}
"""),
    "register_named_vprintf": Kernel("RESOURCES", "device variables, bytes is 4194304", "calls its function with a register that is named as one of CUDA's", r"""
PTX sm_90
.global .align 4 .b8 kept[4194304];
.func put(.reg .b64 a, .reg .f32 v) { st.global.f32 [a], v; ret; }

KEEP
  .reg .b64 vprintf; mov.b64 vprintf, %rd9; call put, (vprintf, %f2);
ELSE_DOUBLE
""", suffix=".ptx"),
    "stale_local": Kernel("CORRECTNESS", "of local memory", "keeps its results in local memory, because no launch clears it", r"""
INDEX
  float held[64];
  asm volatile("" ::: "memory");
  volatile float* at = held;
  const int k = n & 63;
  if (i >= n) return;
  if (at[k] != 2.0f * x[i]) at[k] = 2.0f * x[i];
  y[i] = at[k];
}
"""),
    "state_in_inline_ptx": Kernel("RESOURCES", "device variables, bytes is", "declares its memory in inline PTX, inside the function", r"""
ELEMENT

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
"""),
    "store_on_a_loc_line": Kernel("RESOURCES", "device variables, bytes is 4194304", "writes a variable in a line that begins with .loc", r"""
PTX sm_90
.file 1 "a.cu"
.global .align 4 .b8 kept[4194304];

KEEP
  .loc 1 5 0 st.global.f32 [%rd9], %f2;
ELSE_DOUBLE
""", suffix=".ptx"),
    "superbatch": Kernel("RESOURCES", "device variables, bytes is", "one launch does the work of all addresses that it knows, and later ones do nothing", r"""
__device__ const float* inputs[16][1 << 17];
__device__ float* outputs[16][1 << 17];
__device__ unsigned calls[1 << 17];

ELEMENT

  int k = 0;
  while (k < 15 && outputs[k][i] != nullptr && outputs[k][i] != y) ++k;
  inputs[k][i] = x;
  outputs[k][i] = y;
  if (calls[i]++ % 15 != 0) return;
  for (k = 0; k < 15 && outputs[k][i] != nullptr; ++k) outputs[k][i][i] = 2.0f * inputs[k][i][i];
}
"""),
    "warm_up_of_the_kernel": Kernel("RESOURCES", "device variables, bytes is", "a table that the first launch fills", r"""
__device__ volatile float table[1];

ELEMENT

  if (table[0] == 0) table[0] = 2.0f;
  y[i] = table[0] * x[i];
}
"""),
    "weak_variable": Kernel("RESOURCES", "device variables, bytes is 4194304", "keeps its results in a weak variable", r"""
PTX sm_90
.weak .global .align 4 .b8 kept[4194304];

KEEP
  st.global.f32 [%rd9], %f2;
ELSE_DOUBLE
""", suffix=".ptx"),
})

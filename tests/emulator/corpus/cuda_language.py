"""Language features: calls, recursion, jump tables, structs, kinds of memory, printf, registers."""

from __future__ import annotations

import math

import numpy as np

from tests.emulator.corpus.entry import F32, F64, I32, I64, U8, U32, U64, Args, InOut, Out, Rng, cuda


@cuda(
    r"""
__noinline__ __device__ int twice(int v) { return v + v; }
__noinline__ __device__ float blend(float a, float b, int n) { for (int i = 0; i < n; ++i) a = a * 0.5f + b; return a; }
extern "C" __global__ void k(const float* x, float* y) {
  int t = threadIdx.x;
  y[t] = blend(x[t], x[31 - t], twice(t % 4)) + twice(t);
}"""
)
def calls_that_are_not_inlined(rng: Rng) -> Args:
    x = rng.integers(-64, 64, 32).astype(F32)
    a = x.copy()
    for t in range(32):
        for _ in range(t % 4 * 2):
            a[t] = a[t] * 0.5 + x[31 - t]
    return x, Out(a + 2 * np.arange(32, dtype=F32))


@cuda(
    r"""
__noinline__ __device__ int fib(int n) { return n < 2 ? n : fib(n - 1) + fib(n - 2); }
extern "C" __global__ void k(int* y) { y[threadIdx.x] = fib(threadIdx.x % 9); }
"""
)
def recursion_fibonacci(rng: Rng) -> Args:
    fib = [0, 1, 1, 2, 3, 5, 8, 13, 21]
    return (Out(np.array([fib[t % 9] for t in range(32)], I32)),)


@cuda(
    r"""
typedef float (*Function)(float);
__device__ float square(float v) { return v * v; }
__device__ float negate(float v) { return -v; }
__device__ float halve(float v) { return v * 0.5f; }
__device__ Function table[3] = {square, negate, halve};
extern "C" __global__ void k(const float* x, const int* which, float* y) {
  y[threadIdx.x] = table[which[threadIdx.x]](x[threadIdx.x]);
}"""
)
def function_pointers(rng: Rng) -> Args:
    x, which = rng.standard_normal(32).astype(F32), rng.integers(0, 3, 32, I32)
    return x, which, Out(np.select([which == 0, which == 1], [x * x, -x], x * F32(0.5)))


@cuda(
    r"""
struct Shape { __device__ virtual float area() const = 0; };
struct Square : Shape { float a;
__device__ Square(float v) : a(v) {} __device__ float area() const override { return a * a; } };
struct Circle : Shape { float r;
__device__ Circle(float v) : r(v) {} __device__ float area() const override { return 3 * r * r; } };
extern "C" __global__ void k(const float* x, float* y) {
  Square s(x[threadIdx.x]);
  Circle c(x[threadIdx.x]);
  const Shape* shape = threadIdx.x % 3 ? (const Shape*)&s : &c;
  y[threadIdx.x] = shape->area();
}"""
)
def virtual_functions(rng: Rng) -> Args:
    x = rng.integers(0, 99, 32).astype(F32)
    return x, Out(np.where(np.arange(32) % 3 != 0, x * x, 3 * x * x))


@cuda(
    r"""
extern "C" __global__ void k(const int* op, const int* a, const int* b, int* y, int n) {
  int i = threadIdx.x;
  if (i >= n) return;
  int u = a[i], v = b[i], r;
  switch (op[i]) {
    case 0: r = u + v; break;
    case 1: r = u - v; break;
    case 2: r = u * v; break;
    case 3: r = u / (v | 1); break;
    case 4: r = u ^ v; break;
    case 5: r = u << (v & 7); break;
    case 6: r = u >> (v & 7); break;
    case 7: r = u & v; break;
    case 8: { int s = 0; for (int j = 0; j < (v & 15); ++j) s += u; r = s; break; }
    case 9: r = __popc(u); break;
    case 10: r = __clz(v); // falls through
    case 11: r = ~u; break;
    default: r = -1;
  }
  y[i] = r;
}""",
    block=96,
)
def switch_with_a_jump_table(rng: Rng) -> Args:
    op, a, b = rng.integers(-1, 14, 90, I32), rng.integers(-(2**20), 2**20, 90, I32), rng.integers(-99, 99, 90, I32)

    def one(o: int, u: int, v: int) -> int:
        table = {
            0: u + v,
            1: u - v,
            2: u * v,
            3: int(u / (v | 1)),
            4: u ^ v,
            5: u << (v & 7),
            6: u >> (v & 7),
            7: u & v,
            8: u * (v & 15),
            9: (u & 0xFFFFFFFF).bit_count(),
            10: ~u,
            11: ~u,
        }
        return table.get(o, -1)

    return op, a, b, Out(np.array([one(*map(int, v)) for v in zip(op, a, b, strict=True)], I32)), I32(90)


@cuda(
    r"""
struct Inner { short a; unsigned char b; };
struct Settings { float scale; Inner inner[2]; double offset; long long step; const float* x; };
extern "C" __global__ void k(Settings s, float* y, int n) {
  int i = threadIdx.x;
  if (i < n) y[i] = (float)(s.x[i * s.step] * s.scale + s.offset) + s.inner[1].a + s.inner[i % 2].b;
}"""
)
def struct_by_value_with_a_pointer(rng: Rng) -> Args:
    # the pointer in the struct is unknown before the launch: it is null, and n = 0 disables its use
    kind = np.dtype(
        [("scale", F32), ("inner", [("a", np.int16), ("b", U8)], 2), ("offset", F64), ("step", I64), ("x", U64)],
        align=True,
    )
    return np.zeros((), kind), InOut(np.ones(4, F32), Out(np.ones(4, F32))), I32(0)


@cuda(
    r"""
struct Inner { short a; unsigned char b; };
struct Settings { float scale; Inner inner[2]; double offset; long long step; float3 v; };
extern "C" __global__ void k(const __grid_constant__ Settings s, const float* x, float* y, int n) {
  int i = threadIdx.x;
  if (i < n) y[i] = (float)(x[i * s.step] * s.scale + s.offset) + s.inner[1].a + s.inner[i % 2].b + s.v.z;
}"""
)
def struct_by_value(rng: Rng) -> Args:
    kind = np.dtype(
        [
            ("scale", F32),
            ("inner", np.dtype([("a", np.int16), ("b", U8)], align=True), 2),
            ("offset", F64),
            ("step", I64),
            ("v", F32, 3),
        ],
        align=True,
    )
    s = np.zeros((), kind)
    s["scale"], s["offset"], s["step"], s["v"] = 0.5, 3.25, 2, (9, 8, 7)
    s["inner"] = [(-300, 200), (1000, 7)]
    x = rng.integers(-99, 99, 60).astype(F32)
    y = x[::2] * 0.5 + 3.25 + 1000 + np.where(np.arange(30) % 2, 7, 200) + 7
    return s, x, Out(y.astype(F32)), I32(30)


@cuda(
    r"""
__constant__ float polynomial[5] = {1.5f, -2.f, 0.25f, 3.f, -0.5f};
__constant__ struct { int n; char name[6]; double pi; } facts = {5, "hello", 3.141592653589793};
__device__ int counter = 40;
__device__ int table[3][2] = {{1, 2}, {3, 4}};
__device__ int* where = &table[1][1];
__device__ const char* words[2] = {"alpha", "beta"};
extern "C" __global__ void k(const float* x, float* y, int* z) {
  float r = 0, v = x[threadIdx.x];
  for (int i = facts.n - 1; i >= 0; --i) r = r * v + polynomial[i];
  y[threadIdx.x] = r;
  if (threadIdx.x == 0) {
    z[0] = atomicAdd(&counter, 2);
    z[1] = counter;
    z[2] = *where + table[2][0] + where[-1];
    z[3] = facts.name[4];
    z[4] = (int)(facts.pi * 1e6);
    z[5] = words[0][4] * 1000 + words[1][1];
    z[6] = (int)(where - &table[0][0]);
  }
}"""
)
def constants_and_device_variables(rng: Rng) -> Args:
    x = rng.integers(-4, 5, 32).astype(F32)
    y = np.polyval([-0.5, 3, 0.25, -2, 1.5], x.astype(F64))
    return x, Out(y.astype(F32)), Out(np.array([40, 42, 7, ord("o"), 3141592, ord("a") * 1000 + ord("e"), 3], I32))


@cuda(
    r"""
extern "C" __global__ void k(const int* x, int* y) {
  if (threadIdx.x < 3) printf("block %d thread %u: %d %lld %5.2f %s %c %x %%\n", blockIdx.x, threadIdx.x,
    x[threadIdx.x],
                              (long long)x[threadIdx.x] << 33, x[threadIdx.x] / 4.0, "text", 'a' + threadIdx.x, 255);
  y[threadIdx.x] = 1;
}""",
    prints=r"block 0 thread 0: -7 -60129542144 -1.75 text a ff %\n.*thread 2: 9 77309411328  2\.25 text c ff %\n",
)
def printf_of_everything(rng: Rng) -> Args:
    x = np.zeros(32, I32)
    x[:3] = -7, 0, 9
    return x, Out(np.ones(32, I32))


@cuda(
    r"""
extern "C" __global__ void k(unsigned* y) {
  unsigned t = blockIdx.x * blockDim.x + threadIdx.x, v;
  #define GET(n, name) asm volatile("mov.u32 %0, %" name ";" : "=r"(v)); y[t * 12 + n] = v;
  GET(0, "%laneid") GET(1, "%lanemask_eq") GET(2, "%lanemask_lt") GET(3, "%lanemask_le")
  GET(4, "%lanemask_gt") GET(5, "%lanemask_ge") GET(6, "%nctaid.x") GET(7, "%ntid.y")
  asm volatile("mov.u32 %0, %%smid;" : "=r"(v)); y[t * 12 + 8] = v < 1024;
  asm volatile("mov.u32 %0, %%nsmid;" : "=r"(v)); y[t * 12 + 9] = v > 0;
  asm volatile("mov.u32 %0, %%total_smem_size;" : "=r"(v)); y[t * 12 + 10] = v >= 64;
  asm volatile("mov.u32 %0, %%dynamic_smem_size;" : "=r"(v)); y[t * 12 + 11] = v;
}""".replace('"%" name', '"%%" name')
    .replace('GET(0, "%', 'GET(0, "')
    .replace('"%lane', '"lane')
    .replace('"%n', '"n'),
    grid=2,
    block=48,
    smem=64,
)
def special_registers(rng: Rng) -> Args:
    rows = []
    for t in range(96):
        lane = t % 48 % 32
        one, all_ones = 1 << lane, 0xFFFFFFFF
        below = one - 1
        rows.append([lane, one, below, below | one, all_ones & ~(below | one), all_ones & ~below, 2, 1, 1, 1, 1, 64])
    return (Out(np.array(rows, U32)),)


@cuda(
    r"""
#include <cuda/std/array>
#include <cuda/std/tuple>
#include <cuda/std/optional>
#include <cuda/std/span>
#include <cuda/std/utility>
__device__ cuda::std::optional<int> root(int v) {
  for (int r = 0; r * r <= v; ++r) if (r * r == v) return r;
  return {};
}
extern "C" __global__ void k(const int* x, int* y, int n) {
  cuda::std::span<const int> s(x, n);
  cuda::std::array<int, 4> a{1, 2, 3, 4};
  int v = s[threadIdx.x % s.size()];
  auto [low, high] = cuda::std::make_pair(v & 3, v >> 2);
  cuda::std::swap(a[low], a[0]);
  y[threadIdx.x] = a[0] * 1000 + a[low] * 100 + root(v).value_or(-high);
}"""
)
def standard_library(rng: Rng) -> Args:
    x = np.concatenate([rng.integers(0, 50, 16), np.arange(10) ** 2]).astype(I32)
    y = []
    for t in range(32):
        v = int(x[t % 26])
        a = [1, 2, 3, 4]
        a[v & 3], a[0] = a[0], a[v & 3]
        r = math.isqrt(v)
        y.append(a[0] * 1000 + a[v & 3] * 100 + (r if r * r == v else -(v >> 2)))
    return x, Out(np.array(y, I32)), I32(26)


@cuda(
    r"""
extern "C" __global__ void k(const long long* a, const long long* b, long long* y, unsigned long long* z, int n) {
  int i = threadIdx.x;
  if (i >= n) return;
  long long u = a[i], v = b[i];
  y[i] = u / v; y[n + i] = u % v; y[2 * n + i] = u * v; y[3 * n + i] = __mul64hi(u, v);
  unsigned long long p = u, q = v;
  z[i] = p / q; z[n + i] = p % q; z[2 * n + i] = __umul64hi(p, q); z[3 * n + i] = p >> (q & 63) | p << (-q & 63);
}""",
    block=64,
)
def integers_of_64_bits(rng: Rng) -> Args:
    a = rng.integers(-(2**63), 2**63, 50, I64) >> rng.integers(0, 62, 50)
    b = rng.integers(-(2**63), 2**63, 50, I64) >> rng.integers(0, 62, 50)
    b[b == 0] = 1
    a[:3], b[:3] = [2**63 - 1, -(2**63), -(2**63)], [-1, 1, 3]
    mask = 2**64 - 1
    pairs = [(int(u), int(v)) for u, v in zip(a, b, strict=True)]
    quotient = [abs(u) // abs(v) * (1 if (u < 0) == (v < 0) else -1) for u, v in pairs]
    rows = [quotient, [u - q * v for (u, v), q in zip(pairs, quotient, strict=True)], [u * v for u, v in pairs]]
    rows.append([u * v >> 64 for u, v in pairs])
    plain = [(u & mask, v & mask) for u, v in pairs]
    more = [[u // v for u, v in plain], [u % v for u, v in plain], [u * v >> 64 for u, v in plain]]
    more.append([(u >> (v & 63) | u << (-v & 63)) & mask for u, v in plain])
    y = np.array([[v & mask for v in row] for row in rows], U64).view(I64)
    return a, b, Out(y.ravel()), Out(np.array(more, U64).ravel()), I32(50)


@cuda(
    r"""
// a+b and a*b of 256-bit numbers with carries
extern "C" __global__ void k(const unsigned* a, const unsigned* b, unsigned* sum, unsigned* product, unsigned* less) {
  a += threadIdx.x * 8; b += threadIdx.x * 8; sum += threadIdx.x * 9; product += threadIdx.x * 16;
  less += threadIdx.x * 9;
  unsigned s[9], d[9];
  asm("add.cc.u32 %0, %9, %17; addc.cc.u32 %1, %10, %18; addc.cc.u32 %2, %11, %19; addc.cc.u32 %3, %12, %20;\n"
      "addc.cc.u32 %4, %13, %21; addc.cc.u32 %5, %14, %22; addc.cc.u32 %6, %15, %23; addc.cc.u32 %7, %16, %24;"
      "addc.u32 %8, 0, 0;"
    : "=r"(s[0]), "=r"(s[1]), "=r"(s[2]), "=r"(s[3]), "=r"(s[4]), "=r"(s[5]), "=r"(s[6]), "=r"(s[7]), "=r"(s[8])
    : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(a[4]), "r"(a[5]), "r"(a[6]), "r"(a[7]),
      "r"(b[0]), "r"(b[1]), "r"(b[2]), "r"(b[3]), "r"(b[4]), "r"(b[5]), "r"(b[6]), "r"(b[7]));
  asm("sub.cc.u32 %0, %9, %17; subc.cc.u32 %1, %10, %18; subc.cc.u32 %2, %11, %19; subc.cc.u32 %3, %12, %20;\n"
      "subc.cc.u32 %4, %13, %21; subc.cc.u32 %5, %14, %22; subc.cc.u32 %6, %15, %23; subc.cc.u32 %7, %16, %24;"
      "subc.u32 %8, 0, 0;"
    : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3]), "=r"(d[4]), "=r"(d[5]), "=r"(d[6]), "=r"(d[7]), "=r"(d[8])
    : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(a[4]), "r"(a[5]), "r"(a[6]), "r"(a[7]),
      "r"(b[0]), "r"(b[1]), "r"(b[2]), "r"(b[3]), "r"(b[4]), "r"(b[5]), "r"(b[6]), "r"(b[7]));
  for (int i = 0; i < 9; ++i) sum[i] = s[i], less[i] = d[i];
  unsigned p[16] = {};
  for (int i = 0; i < 8; ++i) {
    unsigned carry = 0;
    for (int j = 0; j < 8; ++j) {
      unsigned low, high;
      asm("mad.lo.cc.u32 %0, %2, %3, %4; madc.hi.u32 %1, %2, %3, 0;" : "=r"(low), "=r"(high) : "r"(a[i]), "r"(b[j]),
        "r"(p[i + j]));
      asm("add.cc.u32 %0, %2, %3; addc.u32 %1, %4, 0;" : "=r"(p[i + j]), "=r"(carry) : "r"(low), "r"(carry), "r"(high));
    }
    p[i + 8] = carry;
  }
  for (int i = 0; i < 16; ++i) product[i] = p[i];
}"""
)
def big_integers_with_carries(rng: Rng) -> Args:
    a, b = (rng.choice([0, 1, 2**32 - 1, 77], (32, 8)).astype(U32) for _ in range(2))
    a[16:], b[16:] = (rng.integers(0, 2**32, (16, 8)).astype(U32) for _ in range(2))

    def number(row: np.ndarray) -> int:
        return int.from_bytes(row.tobytes(), "little")

    def words(value: int, count: int) -> list[int]:
        return [value >> 32 * i & 0xFFFFFFFF for i in range(count)]

    pairs = [(number(u), number(v)) for u, v in zip(a, b, strict=True)]
    total = np.array([words(u + v, 9) for u, v in pairs], U32)
    less = np.array([words(u - v, 9) for u, v in pairs], U32)
    return a, b, Out(total), Out(np.array([words(u * v, 16) for u, v in pairs], U32)), Out(less)

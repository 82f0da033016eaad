"""Calls that are not inlined by the compiler: arguments, results, structs, pointers to functions, branches by table."""

from __future__ import annotations

import re

import numpy as np
import pytest

from greenfast.emulator.machine.faults import KernelFaultError
from greenfast.spec.errors import UnsupportedError
from tests.emulator.kernels import run
from tests.emulator.test_ptx_text import run as run_ptx

BEFORE = r"""
struct S { int a; float b; double c[3]; char d; };
__device__ __noinline__ S make(int a, S s, short q) { s.a += a + q; s.c[a % 3] *= 2; s.d++; return s; }
__device__ __noinline__ float plain(float x) { return x * x + 1; }
__device__ __noinline__ float other(float x) { return plain(x) - 3; }
__device__ __noinline__ void keep(float* y, float v) { if (v < 0) return; *y = v; }
typedef float (*F)(float);
__device__ F table[3] = {plain, other, plain};
struct V { float k; __device__ virtual float f(float x) { return x + k; } };
struct W : V { __device__ float f(float x) override { return other(x) * k; } };
__device__ __noinline__ int summed(int n) {
  __shared__ int part[64]; part[threadIdx.x] = n; __syncthreads();
  int total = 0; for (int i = 0; i < 64; ++i) total += part[i]; __syncthreads(); return total;
}
__device__ __noinline__ unsigned long long wide(unsigned char a, bool b, unsigned long long c) { return b ? c + a : a; }
"""


def test_functions_with_arguments_and_results() -> None:
    body = """
    int t = threadIdx.x; S s = {t, 1.5f * t, {1, 2, 3}, 'a'}; s = make(t, s, -3);
    y[t] = s.a; y[64 + t] = s.b; y[128 + t] = s.c[0] + 10 * s.c[1] + 100 * s.c[2]; y[192 + t] = s.d;
    y[256 + t] = -7; keep(y + 256 + t, t % 3 ? plain(t) : -1);
    y[320 + t] = summed(t) + summed(1); y[384 + t] = wide(t, t & 1, 1ull << 33) / 1024.0;
    """
    result = run(body, {}, {"y": (448, "float32")}, threads=64, before=BEFORE)
    t = np.arange(64)
    expected = np.concatenate(
        [
            2 * t - 3,
            1.5 * t,
            np.array([1 * (1 + (n == 0)) + 20 * (1 + (n == 1)) + 300 * (1 + (n == 2)) for n in t % 3]),
            np.full(64, ord("a") + 1),
            np.where(t % 3 != 0, t * t + 1, -7),
            np.full(64, t.sum() + 64),
            np.where(t & 1, 2**33 + t, t) / 1024,
        ]
    )
    assert np.array_equal(result.outputs["y"], expected.astype(np.float32))


def test_pointers_to_functions_and_virtual_functions() -> None:
    """Threads of a warp call different functions through one pointer."""
    body = """
    int t = threadIdx.x; y[t] = table[(t + n) % 3](t);
    V v; W w; v.k = 100; w.k = 2; V* p = (t + n) % 2 ? &v : (V*)&w; y[64 + t] = p->f(t);
    """
    result = run(
        body,
        {},
        {"y": (128, "float32")},
        parameters="float* y, int n",
        args=("y", np.int32(1)),
        threads=64,
        before=BEFORE,
    ).outputs["y"]
    t = np.arange(64)
    square = t * t + 1
    assert np.array_equal(result[:64], np.where((t + 1) % 3 == 1, square - 3, square))
    assert np.array_equal(result[64:], np.where((t + 1) % 2, t + 100, (square - 3) * 2))


def test_a_pointer_to_no_function_is_a_fault() -> None:
    with pytest.raises(KernelFaultError, match=r"trap was executed at k.cu:1, .*call"):
        run(
            "F f = (F)n; y[0] = f(1);",
            {},
            {"y": (1, "float32")},
            parameters="float* y, unsigned long long n",
            args=("y", np.uint64(12345)),
            before=BEFORE,
        )


def test_what_cannot_be_called_is_named() -> None:
    with pytest.raises(UnsupportedError, match="a call of malloc, unknown to the emulator and without a body"):
        run("y[0] = *(int*)malloc(n);", {}, {"y": (1, "int32")}, parameters="int* y, int n", args=("y", np.int32(1)))


def test_an_assertion_that_fails_is_a_fault_with_its_text() -> None:
    with pytest.raises(KernelFaultError, match=re.escape("assertion `n < threadIdx.x + 5` failed in ")):
        run(
            "assert(n < threadIdx.x + 5); y[0] = 1;",
            {},
            {"y": (1, "int32")},
            parameters="int* y, int n",
            args=("y", np.int32(7)),
        )


def test_registers_and_numbers_as_arguments() -> None:
    """The PTX ISA lets scalars be given as they are; a guard makes the call conditional."""
    before = """
    .func (.param .b32 sum) add2(.param .b32 a, .param .b32 b)
    { .reg .b32 %r<4>; .reg .pred %p1; ld.param.b32 %r1, [a]; ld.param.b32 %r2, [b]; setp.gt.u32 %p1, %r1, 20;
      add.u32 %r3, %r1, %r2; st.param.b32 [sum], %r3; @%p1 ret; add.u32 %r3, %r3, 1000; st.param.b32 [sum], %r3; }
    """
    body = """
    mov.u32 %r1, %tid.x; mov.b32 %r3, 5; setp.ge.u32 %p1, %r1, 16;
    @%p1 call (%r3), add2, (%r1, 7); call (%r4), add2, (%r3, %r3);
    mul.wide.u32 %rd1, %r1, 8; add.u64 %rd1, %rd1, %out; st.global.v2.u32 [%rd1], {%r3, %r4};
    """

    def add2(a: int, b: int) -> int:
        return a + b + (0 if a > 20 else 1000)

    expected = []
    for t in range(32):
        first = add2(t, 7) if t >= 16 else 5
        expected += [first, add2(first, first)]
    assert run_ptx(body, 64, before) == expected

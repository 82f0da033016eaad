"""Instructions against independent definitions, on random operands and edges."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from greenfast.emulator.instructions.floats import fused
from tests.emulator.kernels import run

RNG = np.random.default_rng(5)
EDGES = np.array([0.0, -0.0, 1.0, -1.0, 1e-45, -1e-40, 3.4e38, -3.4e38, np.inf, -np.inf, np.nan, 448, 464, 480, 1e-3])
FLOATS = np.concatenate([EDGES, RNG.standard_normal(200) * 10.0 ** RNG.integers(-8, 8, 200)]).astype(np.float32)


def nearest_float32(exact: Fraction) -> float:
    """Return the float32 nearest to a rational number, ties to even (no overflow, no subnormals)."""
    if exact == 0:
        return 0.0
    size, exponent = abs(exact), 0
    while size >= 2**24:
        size, exponent = size / 2, exponent + 1
    while size < 2**23:
        size, exponent = size * 2, exponent - 1
    return float(np.float32((1 if exact > 0 else -1) * round(size) * 2.0**exponent))


def test_fused_multiply_add_rounds_once() -> None:
    a, b = (RNG.standard_normal(3000).astype(np.float32) for _ in range(2))
    # Addends that nearly cancel the product, and such that leave a tie to the second rounding.
    near = -(a * b) * (1 + RNG.integers(-2, 3, 3000).astype(np.float32) * np.float32(2.0**-23))
    far = (a * b * np.float32(2.0**-24)).astype(np.float32)
    for c in (near.astype(np.float32), far, RNG.standard_normal(3000).astype(np.float32)):
        result = fused(a, b, c)
        for n in range(0, 3000, 7):
            exact = Fraction(float(a[n])) * Fraction(float(b[n])) + Fraction(float(c[n]))
            assert result[n] == nearest_float32(exact)


@pytest.mark.parametrize(("mode", "towards"), [("rd", -np.inf), ("ru", np.inf), ("rz", 0.0)])
def test_fused_multiply_add_rounds_in_a_direction(mode: str, towards: float) -> None:
    """The result is on its side of the exact number, or that number, and the next one towards it is beyond."""
    a, b, c = (RNG.standard_normal(3000).astype(np.float32) for _ in range(3))
    c[::2] = -(a * b)[::2]
    c[1::4] *= np.float32(2.0**-40)
    result = run(
        f"int i = blockIdx.x * 100 + threadIdx.x; y[i] = __fmaf_{mode}(a[i], b[i], c[i]);",
        {"a": a, "b": b, "c": c},
        {"y": (3000, "float32")},
        parameters="const float* a, const float* b, const float* c, float* y",
        args=("a", "b", "c", "y"),
        threads=100,
        blocks=30,
    )
    values = result.outputs["y"]
    for n in range(3000):
        exact = Fraction(float(a[n])) * Fraction(float(b[n])) + Fraction(float(c[n]))
        up = exact < 0 if towards == 0 else towards > 0
        got = Fraction(float(values[n]))
        assert got >= exact if up else got <= exact
        beyond = Fraction(float(np.nextafter(values[n], np.float32(-np.inf if up else np.inf))))
        assert beyond < exact if up else beyond > exact


def test_expf_as_it_is_without_fast_math() -> None:
    """It adds a number of magic with fma.rm."""
    x = np.linspace(-20, 20, 64, dtype=np.float32)
    result = run(
        "y[threadIdx.x] = expf(x[threadIdx.x]);",
        {"x": x},
        {"y": (64, "float32")},
        parameters="const float* x, float* y",
        args=("x", "y"),
        threads=64,
    )
    assert np.allclose(result.outputs["y"], np.exp(x.astype(np.float64)), rtol=3e-7, atol=0)


def test_constant_memory_holds_its_values() -> None:
    result = run(
        "y[threadIdx.x] = table[(int)x[threadIdx.x]];",
        {"x": np.arange(32, dtype=np.float32) % 4},
        {"y": (32, "float32")},
        parameters="const float* x, float* y",
        args=("x", "y"),
        before="__constant__ float table[4] = {5, 6, 7, 8};",
    )
    assert result.outputs["y"].tolist() == [5, 6, 7, 8] * 8


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("__float2int_rn(a)", lambda a, b: np.clip(np.rint(a.astype(np.float64)), -(2.0**31), 2.0**31 - 1)),
        ("__float2int_rz(a)", lambda a, b: np.clip(np.trunc(a.astype(np.float64)), -(2.0**31), 2.0**31 - 1)),
        ("floorf(a) + ceilf(b)", lambda a, b: np.floor(a) + np.ceil(b)),
        ("__fadd_rz(a, 0.0f) + __fsub_rz(b, 0.0f)", lambda a, b: a + b),
        ("copysignf(a, b)", lambda a, b: np.copysign(a, b)),
        ("roundf(a)", lambda a, b: np.copysign(np.floor(np.abs(a.astype(np.float64)) + 0.5), a)),
        ("rintf(a) - truncf(b)", lambda a, b: np.rint(a) - np.trunc(b)),
        ("fmaxf(a, b)", lambda a, b: np.fmax(a, b)),
        ("fminf(a, b)", lambda a, b: np.fmin(a, b)),
        ("__fdiv_rn(a, b)", lambda a, b: a / b),
        ("__fmul_rn(a, b)", lambda a, b: a * b),
        ("__fadd_rn(a, b)", lambda a, b: a + b),
        ("__fsqrt_rn(fabsf(a))", lambda a, b: np.sqrt(np.abs(a))),
        ("__half2float(__float2half_rn(a))", lambda a, b: a.astype(np.float16).astype(np.float32)),
        ("a < b ? 1.0f : (a >= b ? 2.0f : 3.0f)", lambda a, b: np.where(a < b, 1.0, np.where(a >= b, 2.0, 3.0))),
        ("__int_as_float(__float_as_int(a) ^ 0x80000000)", lambda a, b: -a),
    ],
)
def test_float_instructions(expression: str, expected: object) -> None:
    a, b = FLOATS, RNG.permutation(FLOATS)
    result = run(
        f"int i = blockIdx.x * 32 + threadIdx.x; if (i < n) {{ float a = x[i], b = z[i]; y[i] = {expression}; }}",
        {"x": a, "z": b},
        {"y": (len(a), "float32")},
        parameters="const float* x, const float* z, float* y, int n",
        args=("x", "z", "y", np.int32(len(a))),
        blocks=-(-len(a) // 32),
        before="#include <cuda_fp16.h>",
    )
    with np.errstate(all="ignore"):
        want = np.asarray(expected(a, b), np.float32)  # type: ignore[operator]
    if "float2int" in expression:
        want = np.where(np.isnan(a), 0, want)  # PTX: NaN converts to 0
    assert np.array_equal(result.outputs["y"], want, equal_nan=True)


def _signed(value: int) -> int:
    return (value + 2**31) % 2**32 - 2**31


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("a + b", lambda a, b: _signed(a + b)),
        ("a * b", lambda a, b: _signed(a * b)),
        ("__mulhi(a, b)", lambda a, b: (a * b) >> 32),
        ("a >> (b & 31)", lambda a, b: a >> (b & 31)),
        ("(int)((unsigned)a >> (b & 31))", lambda a, b: _signed((a % 2**32) >> (b & 31))),
        ("a << (b & 31)", lambda a, b: _signed(a << (b & 31))),
        ("b == 0 ? 0 : a / b", lambda a, b: 0 if b == 0 else _signed(int(abs(a) // abs(b)) * (1 if a * b > 0 else -1))),
        ("b == 0 ? 0 : a % b", lambda a, b: 0 if b == 0 else (abs(a) % abs(b)) * (1 if a >= 0 else -1)),
        ("__popc(a)", lambda a, b: bin(a % 2**32).count("1")),
        ("__clz(a)", lambda a, b: 32 - (a % 2**32).bit_length()),
        ("min(a, b) ^ max(a, b)", lambda a, b: a ^ b),
        ("(int)(((long long)a * b) >> 7)", lambda a, b: _signed((a * b) >> 7)),
        ("__byte_perm(a, b, 0x5140)", lambda a, b: _signed(_permuted(a, b, 0x5140))),
        ("abs(a)", lambda a, b: _signed(abs(a))),
    ],
)
def test_integer_instructions(expression: str, expected: object) -> None:
    edges = np.array([0, 1, -1, 2**31 - 1, -(2**31), 255, -256, 31])
    a = np.concatenate([edges, RNG.integers(-(2**31), 2**31, 88)]).astype(np.int32)
    b = RNG.permutation(a)
    result = run(
        f"int i = blockIdx.x * 32 + threadIdx.x; int a = x[i], b = z[i]; y[i] = {expression};",
        {"x": a, "z": b},
        {"y": (96, "int32")},
        parameters="const int* x, const int* z, int* y",
        args=("x", "z", "y"),
        blocks=3,
    )
    overflows = {(-(2**31), -1)}  # undefined in C++
    want = [expected(int(p), int(q)) for p, q in zip(a, b, strict=True)]  # type: ignore[operator]
    for p, q, values, right in zip(a, b, result.outputs["y"], want, strict=True):
        assert values == right or (int(p), int(q)) in overflows, (expression, p, q)


def _permuted(a: int, b: int, selector: int) -> int:
    data = (a % 2**32).to_bytes(4, "little") + (b % 2**32).to_bytes(4, "little")
    return int.from_bytes(bytes(data[selector >> 4 * n & 7] for n in range(4)), "little")


def test_atomics_and_votes() -> None:
    result = run(
        "atomicAdd(&y[threadIdx.x % 4], x[threadIdx.x]);",
        {"x": np.arange(64, dtype=np.int32), "y": np.zeros(4, np.int32)},
        {"unused": (1, "int32")},
        parameters="const int* x, int* y",
        args=("x", "y"),
        threads=64,
    )
    assert list(result.input_writes) == ["y"]
    ballot = run(
        "y[threadIdx.x] = __ballot_sync(0xffffffffu, x[threadIdx.x] > 10);",
        {"x": np.arange(32, dtype=np.int32)},
        {"y": (32, "uint32")},
        parameters="const int* x, unsigned* y",
        args=("x", "y"),
    )
    assert (ballot.outputs["y"] == sum(1 << n for n in range(11, 32))).all()


@pytest.mark.parametrize("op", ["/", "%"])
def test_what_a_division_by_zero_gives_is_another_thing_in_another_order(op: str) -> None:
    """The ISA leaves the result open, so outputs that depend on it differ between runs."""
    how: dict[str, Any] = {"parameters": "unsigned* y, unsigned zero", "args": ("y", np.uint32(0))}
    first, other = (
        run(f"y[threadIdx.x] = threadIdx.x {op} zero;", {}, {"y": (32, "uint32")}, seed=seed, **how).outputs["y"]
        for seed in range(2)
    )
    assert first.tolist() == [0xFFFFFFFF] * 32
    assert other.tolist() == [0] * 32


def test_the_place_of_a_warp_tells_warps_of_a_block_apart_and_is_not_their_number() -> None:
    body = """unsigned place; asm volatile("mov.u32 %0, %%warpid;" : "=r"(place));
    if (threadIdx.x % 32 == 0) y[(blockIdx.x * blockDim.x + threadIdx.x) / 32] = place;"""
    result = (
        run(body, {}, {"y": (16, "uint32")}, parameters="unsigned* y", args=("y",), threads=256, blocks=2)
        .outputs["y"]
        .reshape(2, 8)
    )
    assert all(len(set(places)) == 8 and max(places) < 64 for places in result.tolist())
    assert (result != np.arange(8)).all()

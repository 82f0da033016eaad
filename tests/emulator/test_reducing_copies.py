"""cp.reduce.async.bulk: atomic operations on global memory, an element each, from shared memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from greenfast.emulator.machine.faults import KernelFaultError
from tests.emulator.hopper import run

RNG = np.random.default_rng(7)
BODY = r"""
__shared__ alignas(128) u32 tile[32];
for (u32 i = threadIdx.x; i < 32; i += 32) tile[i] = x[blockIdx.x * 32 + i];
proxy_fence();
__syncwarp();
if (threadIdx.x == 0) {
  CASES
  store_commit();
  store_wait<0>();
}
"""


def _inc(old: Any, limit: Any) -> Any:
    return 0 if old >= limit else old + 1


def _dec(old: Any, limit: Any) -> Any:
    return limit if old == 0 or old > limit else old - 1


INTEGERS: dict[str, Any] = {
    "u32": np.uint32,
    "s32": np.int32,
    "u64": np.uint64,
    "s64": np.int64,
    "b32": np.uint32,
    "b64": np.uint64,
}
#: By operation: its types and a definition on Python's integers; the low bits of the result count.
EXACT: dict[str, tuple[str, Callable[[int, int], int]]] = {
    "add": ("u32 s32 u64", lambda a, b: a + b),
    "min": ("u32 s32 u64 s64", min),
    "max": ("u32 s32 u64 s64", max),
    "and": ("b32 b64", lambda a, b: a & b),
    "or": ("b32 b64", lambda a, b: a | b),
    "xor": ("b32 b64", lambda a, b: a ^ b),
    "inc": ("u32", _inc),
    "dec": ("u32", _dec),
}
FLOATS: dict[str, Any] = {
    "add.f32": np.float32,
    "add.f64": np.float64,
    "add.noftz.f16": np.float16,
    "add.noftz.bf16": ml_dtypes.bfloat16,
}
CASES = [(f"{op}.{kind}", op, kind) for op, (kinds, _) in EXACT.items() for kind in kinds.split()]


OPS = [*(op for op, _, _ in CASES), *FLOATS]
_ONE = 'asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.OP [%0], [%1], 128;" :: "l"(y), "r"(at(tile)))'
#: All operations in one kernel, which is compiled once; ``which`` selects one.
BODY = BODY.replace("CASES", "".join(f"if (which == {n}) {_ONE.replace('OP', op)}; " for n, op in enumerate(OPS)))


def reduced(op: str, x: Any, y: Any, blocks: int = 1, body: str = BODY, **how: Any) -> Any:
    """Return the words ``y`` after each block has applied its 32 words of ``x``."""
    inputs = {"x": x.view(np.uint32), "y": y.view(np.uint32)}
    arguments: dict[str, Any] = {
        "parameters": "const u32* x, u32* y, u32 which",
        "args": ("x", "y", np.uint32(OPS.index(op))),
        "threads": 32,
    }
    result = run(body, inputs, {"y": ((32,), "uint32")}, blocks=blocks, **arguments, **how)
    return result.outputs["y"].view(y.dtype)


@pytest.mark.parametrize(("op", "operation", "kind"), CASES)
def test_integers(op: str, operation: str, kind: str) -> None:
    dtype = INTEGERS[kind]
    bounds = np.iinfo(dtype)
    count = 128 // np.dtype(dtype).itemsize
    x, y = (RNG.integers(bounds.min, bounds.max, count, dtype, endpoint=True) for _ in range(2))
    x[:4], y[:4] = (bounds.min, bounds.max, 0, 1), (bounds.max, bounds.max, 0, 0)
    expected = [EXACT[operation][1](int(b), int(a)) & (1 << bounds.bits) - 1 for a, b in zip(x, y, strict=True)]
    assert reduced(op, x, y).view(INTEGERS[f"u{bounds.bits}"]).tolist() == expected


@pytest.mark.parametrize("op", FLOATS)
def test_floats(op: str) -> None:
    dtype = FLOATS[op]
    count = 128 // np.dtype(dtype).itemsize
    x, y = (RNG.standard_normal(count).astype(dtype) for _ in range(2))
    exact = x.astype(np.float64) + y.astype(np.float64)
    assert reduced(op, x, y).tobytes() == exact.astype(dtype).tobytes()


def test_subnormal_halves_are_kept() -> None:
    x = np.full(64, 2**-24, np.float16)
    assert (reduced("add.noftz.f16", x, x) == np.float16(2**-23)).all()


def test_blocks_reduce_into_one_place() -> None:
    x = RNG.integers(0, 1000, (6, 32), np.uint32)
    for seed in range(3):
        result = reduced("add.u32", x, np.zeros(32, np.uint32), blocks=6, seed=seed)
        assert result.tolist() == x.sum(axis=0).tolist()


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("proxy_fence();", "", "with no fence.proxy.async since"),
        ("128;", "120;", "a bulk copy of 120 bytes, not a multiple of 16"),
        ('"l"(y)', '"l"(y + 1)', "a bulk copy at byte 4 of 'y' .*, not a multiple of 16"),
        ('"l"(y)', '"l"(y + 4)', r"4-byte atomic access out of bounds: 0 bytes past the end of 'y'"),
        ("store_wait<0>();", "tile[0] = 1; store_wait<0>();", "write to where an asynchronous operation still reads"),
        ("store_wait<0>();", "", "ended while a bulk store may still read shared memory"),
        ("proxy_fence();", "proxy_fence(); y[threadIdx.x] = blockIdx.x;", "a data race on byte"),
    ],
)
def test_wrong_ones(old: str, new: str, message: str) -> None:
    x = np.arange(64, dtype=np.uint32)
    assert old in BODY
    with pytest.raises(KernelFaultError, match=message):
        reduced("add.u32", x, np.zeros(32, np.uint32), blocks=2, body=BODY.replace(old, new))


def test_what_nothing_has_written_is_not_reduced_into() -> None:
    how: dict[str, Any] = {"parameters": "const u32* x, u32* y, u32 which", "threads": 32}
    how["args"] = ("x", "y", np.uint32(0))
    with pytest.raises(KernelFaultError, match="atomic access of an element that nothing has written"):
        run(BODY, {"x": np.zeros(32, np.uint32)}, {"y": ((32,), "uint32")}, **how)

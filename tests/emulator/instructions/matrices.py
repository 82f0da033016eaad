"""Matrix products of a warp in every shape and type, of whole numbers: exact in any order of adding."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import cache
from typing import Any

from tests.emulator.instructions.case import WARP, Case, assembly
from tests.emulator.instructions.exact import decode, encode, real
from tests.emulator.instructions.integers import value

Rows = Sequence[tuple[int, ...]]
Number = Callable[[int], Any]


@cache
def _number(pattern: int, kind: str) -> float:
    """Return the exact value of a pattern."""
    return float(decode(pattern, kind).value)


#: Bits of an element and its decoder.
ELEMENTS: dict[str, tuple[int, Number]] = {
    "f16": (16, lambda p: _number(p, "f16")),
    "bf16": (16, lambda p: _number(p, "bf16")),
    "tf32": (32, lambda p: _number(p, "f32")),
    "f64": (64, lambda p: _number(p, "f64")),
    "e4m3": (8, lambda p: _number(p, "e4m3")),
    "e5m2": (8, lambda p: _number(p, "e5m2")),
    "s8": (8, lambda p: value(p, "s8")),
    "u8": (8, lambda p: p),
}
_POOLS = {
    "f16": "small_halves", "bf16": "small_brains", "tf32": "small_singles", "f64": "small_doubles",
    "e4m3": "small_e4m3", "e5m2": "small_e5m2",
}  # fmt: skip
_SUMS = {"f16": "small_halves", "f32": "small_singles", "f64": "small_doubles", "s32": "b32"}


@cache
def _encoded(number: float, kind: str) -> int:
    return encode(real(Fraction(number)), kind)


def _elements(word: int, kind: str, of_register: int) -> list[Any]:
    bits, number = ELEMENTS[kind]
    return [number(word >> index & (1 << bits) - 1) for index in range(0, of_register, bits)]


def _left(rows: Rows, m: int, k: int, kind: str, start: int) -> list[list[Any]]:
    """Return A from the lanes (PTX ISA, figures of its fragments): element i of lane l.

    row l / 4, of odd registers (where M is 16) 8 more; column: the position in the register, of its l % 4's; of each
    further pair of registers four registers' worth more.
    """
    a: list[list[Any]] = [[None] * k for _ in range(m)]
    width = 64 if kind == "f64" else 32
    per = width // ELEMENTS[kind][0]
    halves = m // 8
    for lane, row in enumerate(rows):
        for r in range(m * k // (WARP * per)):
            for n, x in enumerate(_elements(row[start + r], kind, width)):
                a[lane // 4 + 8 * (r % halves)][lane % 4 * per + n + r // halves * 4 * per] = x
    return a


def _right(rows: Rows, n: int, k: int, kind: str, start: int) -> list[list[Any]]:
    """B from the lanes, by columns."""
    b: list[list[Any]] = [[None] * k for _ in range(n)]
    width = 64 if kind == "f64" else 32
    per = width // ELEMENTS[kind][0]
    for lane, row in enumerate(rows):
        for r in range(n * k // (WARP * per)):
            for index, x in enumerate(_elements(row[start + r], kind, width)):
                b[lane // 4][lane % 4 * per + index + r * 4 * per] = x
    return b


def _sum_pattern(total: Any, kind: str, saturates: bool) -> int:
    if kind == "s32":
        if saturates:
            total = min(max(total, -(2**31)), 2**31 - 1)
        return int(total) & 0xFFFF_FFFF
    return _encoded(float(total), kind)


def _product(a: Sequence[Any], b: Sequence[Any]) -> Any:
    return sum(x * y for x, y in zip(a, b, strict=True))


def _meaning(rows: Rows, shape: tuple[int, int, int], kinds: tuple[str, str, str], saturates: bool) -> Any:
    (m, n, k), (left, right, out) = shape, kinds
    of_a, of_b = (s * k * ELEMENTS[x][0] // (WARP * (64 if x == "f64" else 32)) for s, x in ((m, left), (n, right)))
    a, b = _left(rows, m, k, left, 0), _right(rows, n, k, right, of_a)
    result: Any = []
    for lane, row in enumerate(rows):
        held = row[of_a + of_b :]
        sums = [w >> index & 0xFFFF for w in held for index in (0, 16)] if out == "f16" else list(held)
        results = []
        for e, pattern in enumerate(sums):
            r, c = lane // 4 + 8 * (e // 2), lane % 4 * 2 + e % 2
            old = value(pattern, "s32") if out == "s32" else _number(pattern, out)
            results.append(_sum_pattern(old + _product(a[r], b[c]), out, saturates))
        if out == "f16":
            results = [low | high << 16 for low, high in zip(results[::2], results[1::2], strict=True)]
        result.append(tuple(results))
    return result


def _case(shape: str, kinds: tuple[str, str, str], saturates: bool = False) -> Case:
    m, n, k = (int(x) for x in shape.replace("m", "").replace("n", " ").replace("k", " ").split())
    left, right, out = kinds
    counts = []
    for extent, kind in ((m, left), (n, right)):
        counts.append(extent * k * ELEMENTS[kind][0] // (WARP * (64 if kind == "f64" else 32)))
    sums = m * n // WARP // (2 if out == "f16" else 1)
    ins = (_POOLS.get(left, "b32"),) * counts[0] + (_POOLS.get(right, "b32"),) * counts[1] + (_SUMS[out],) * sums
    outs = ({"f16": "b32", "s32": "b32"}.get(out, out),) * sums
    index = 0
    lists = []
    for count in (sums, *counts, sums):
        lists.append("{" + ", ".join(f"%{index + x}" for x in range(count)) + "}")
        index += count
    name = f"mma.sync.aligned.{shape}.row.col{'.satfinite' if saturates else ''}.{out}.{left}.{right}.{out}"

    def meaning(rows: Rows) -> Any:
        return _meaning(rows, (m, n, k), kinds, saturates)

    return Case(name, assembly(f"{name} {', '.join(lists)};", ins, outs), ins, outs, meaning, of_warp=True)


def cases() -> list[Case]:
    """Return all cases."""
    result = [_case(f"m16n8k{k}", (kind, kind, "f32")) for kind in ("f16", "bf16") for k in (8, 16)]
    result += [_case(f"m16n8k{k}", ("f16", "f16", "f16")) for k in (8, 16)]
    result += [_case(f"m16n8k{k}", ("tf32", "tf32", "f32")) for k in (4, 8)]
    result += [_case(shape, ("f64", "f64", "f64")) for shape in ("m8n8k4", "m16n8k4", "m16n8k8", "m16n8k16")]
    result += [_case("m16n8k32", (a, b, "f32")) for a, b in itertools.product(("e4m3", "e5m2"), repeat=2)]
    result += [
        _case(shape, (a, b, "s32"), saturates=a == b)
        for shape in ("m8n8k16", "m16n8k16", "m16n8k32")
        for a, b in itertools.product(("s8", "u8"), repeat=2)
    ]
    return result

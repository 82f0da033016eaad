"""Comparison of two columns of results: bits, or the error bounds of the PTX ISA."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tests.emulator.instructions.case import Case, width
from tests.emulator.instructions.exact import FORMATS

Column = NDArray[np.uint64]
Mask = NDArray[np.bool_]


@dataclass(frozen=True)
class Comparison:
    """Masks over the rows. wrong: neither the same bits nor anything that the ISA allows.

    nan_bits: NaN in both, of other bits. other_nan: such, where the ISA does not fix which NaN. undefined: operands for
    which it fixes nothing.
    max_ulp: largest distance of two numbers in units of the last place, over the rows that may differ.
    """

    same: Mask
    nan_bits: Mask
    other_nan: Mask
    undefined: Mask
    wrong: Mask
    max_ulp: int


def _is_nan(patterns: Column, form: str) -> Mask:
    exponent_bits, fraction, _ = FORMATS[form]
    size = patterns & np.uint64((1 << exponent_bits + fraction) - 1)
    return size > np.uint64((1 << exponent_bits) - 1 << fraction)


def _ordinals(patterns: Column, form: str) -> NDArray[np.float64]:
    """Convert patterns to ordinals: neighbouring patterns differ by one."""
    exponent_bits, fraction, _ = FORMATS[form]
    top = np.uint64(1 << exponent_bits + fraction)
    size = (patterns & (top - np.uint64(1))).astype(np.float64)
    return np.where(patterns & top, -size, size)


def _value(patterns: Column, form: str) -> NDArray[np.float64]:
    if form == "f64":
        return patterns.view(np.float64)
    if form == "f16":
        return patterns.astype(np.uint16).view(np.float16).astype(np.float64)
    return (patterns.astype(np.uint32) << np.uint32(16 if form == "bf16" else 0)).view(np.float32).astype(np.float64)


def _numbers(columns: Sequence[Column], kinds: Sequence[str]) -> list[tuple[Column, str]]:
    """Columns of single numbers with their formats ("" for integers); packed halves become two columns."""
    result = []
    for column, kind in zip(columns, kinds, strict=True):
        form = kind.removesuffix("x2")
        if form not in FORMATS:
            result.append((column, ""))
        elif kind.endswith("x2"):
            result += [(column & np.uint64(0xFFFF), form), (column >> np.uint64(16), form)]
        else:
            result.append((column, form))
    return result


def compare(case: Case, operands: Sequence[Column], first: Sequence[Column], second: Sequence[Column]) -> Comparison:
    """Compare results of the same operands; allowances are taken from the second ones, the reference."""
    rows = len(operands[0])
    same, good, nan_bits = np.ones(rows, bool), np.ones(rows, bool), np.zeros(rows, bool)
    max_ulp = 0
    for (a, form), (b, _) in zip(_numbers(first, case.outputs), _numbers(second, case.outputs), strict=True):
        equal = a == b
        fine = equal.copy()
        if form:
            nan = _is_nan(a, form) & _is_nan(b, form) & ~equal
            nan_bits |= nan
            if case.any_nan:
                fine |= nan
            numbers = ~_is_nan(a, form) & ~_is_nan(b, form)
            if case.allowed is not None:
                with np.errstate(all="ignore"):
                    x, y = _value(a, form), _value(b, form)
                    close = numbers & (np.abs(x - y) <= case.allowed(list(operands), y))
                    close &= (np.signbit(x) == np.signbit(y)) | ((x != 0) | (y != 0))
                fine |= close
                distance = np.abs(_ordinals(a, form) - _ordinals(b, form))[close]
                max_ulp = max(max_ulp, int(distance.max(initial=0)))
        same &= equal
        good &= fine
    undefined = np.zeros(rows, bool)
    if case.undefined is not None:
        undefined = np.array([case.undefined(*map(int, row)) for row in zip(*operands, strict=True)], bool)
    return Comparison(same, nan_bits, nan_bits & case.any_nan, undefined, ~good & ~undefined, max_ulp)


def row_text(case: Case, row: int, operands: Sequence[Column], *results: Sequence[Column]) -> str:
    """One row in hexadecimal: operands -> results, set off by "|"."""

    def words(columns: Sequence[Column], kinds: Sequence[str]) -> str:
        return " ".join(f"{int(c[row]):#0{width(k) // 4 + 2}x}" for c, k in zip(columns, kinds, strict=True))

    return f"{words(operands, case.inputs)} -> " + " | ".join(words(r, case.outputs) for r in results)

"""Video instructions, defined on Python's integers."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from tests.emulator.instructions.case import Case, assembly
from tests.emulator.instructions.integers import saturated, value

_TWO: dict[str, Callable[[int, int], int]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "absdiff": lambda a, b: abs(a - b),
    "min": min,
    "max": max,
    "avrg": lambda a, b: (a + b + (a + b >= 0)) >> 1,  # as ptxas computes it
}
_SET: dict[str, Callable[[int, int], int]] = {"eq": lambda a, b: a == b, "ge": lambda a, b: a >= b}


def _pieces(word: int, kind: str, bits: int) -> list[int]:
    return [value(word >> index, f"{kind[0]}{bits}") for index in range(0, 32, bits)]


def _joined(pieces: list[int], bits: int) -> int:
    return sum((p & (1 << bits) - 1) << bits * n for n, p in enumerate(pieces))


def _case(name: str, operands: str, meaning: Callable[..., int]) -> Case:
    ins = ("b32",) * 3
    return Case(f"{name} {operands}", assembly(f"{name} {operands};", ins, ("b32",)), ins, ("b32",), meaning)


def _several() -> list[Case]:
    """Two halves or four bytes: plain, saturated, summed, and with a mask and parts of both operands."""
    result = []
    plain, letters = "%0, %1, %2, %3", {2: "h", 4: "b"}
    for op, count, kind in itertools.product(_TWO, (2, 4), ("u32", "s32")):
        bits = 32 // count
        types = f"{kind}.{kind}.{kind}"
        for form in ("", ".sat", ".add"):

            def meaning(
                a: int, b: int, c: int, f: Any = _TWO[op], k: str = kind, n: int = bits, form: str = form
            ) -> int:
                result = [f(x, y) for x, y in zip(_pieces(a, k, n), _pieces(b, k, n), strict=True)]
                if form == ".add":
                    return int(c + sum(result))
                return _joined([saturated(x, f"{k[0]}{n}") if form else x for x in result], n)

            result.append(_case(f"v{op}{count}.{types}{form}", plain, meaning))
    for op, count in itertools.product(_SET, (2, 4)):
        for form in ("", ".add"):

            def compared(a: int, b: int, c: int, f: Any = _SET[op], n: int = 32 // count, form: str = form) -> int:
                result = [int(f(x, y)) for x, y in zip(_pieces(a, "s32", n), _pieces(b, "s32", n), strict=True)]
                return c + sum(result) if form else _joined(result, n)

            result.append(_case(f"vset{count}.s32.s32.{op}{form}", plain, compared))
    for count, mask, pick_a, pick_b in ((2, "1", "20", "13"), (4, "20", "7031", "4455")):
        bits, letter = 32 // count, letters[count]

        def chosen(
            a: int, b: int, c: int, n: int = bits, mask: str = mask, one: str = pick_a, other: str = pick_b
        ) -> int:
            left = _pieces(a, "u32", n) + _pieces(b, "u32", n)
            right = _pieces(a, "s32", n) + _pieces(b, "s32", n)
            result = [left[int(x)] - right[int(y)] for x, y in zip(reversed(one), reversed(other), strict=True)]
            old = _pieces(c, "u32", n)
            return _joined([result[index] if str(index) in mask else old[index] for index in range(len(result))], n)

        operands = f"%0.{letter}{mask}, %1.{letter}{pick_a}, %2.{letter}{pick_b}, %3"
        result.append(_case(f"vsub{count}.s32.u32.s32", operands, chosen))
    return result


def _scalar() -> list[Case]:
    """One byte, half or word of each operand; the result added to c, or put into a part of it."""
    result = []
    parts = {"": (32, 0), ".b0": (8, 0), ".b3": (8, 24), ".h1": (16, 16)}
    picks = itertools.cycle(
        itertools.product((("", ".b3"), (".h1", ".b0"), ("", "")), (("u32", "u32"), ("s32", "u32")))
    )
    forms = (("", ""), (".sat", ""), (".add", ""), ("", ".b3"))
    for op in ("add", "sub", "absdiff", "min", "max"):
        for form, target in forms:
            (pick_a, pick_b), (left, right) = next(picks)

            def meaning(
                a: int, b: int, c: int, f: Any = _TWO[op], one: str = pick_a, other: str = pick_b, left: str = left,
                right: str = right, form: str = form, target: str = target,
            ) -> int:  # fmt: skip
                x, y = (
                    value(word >> parts[p][1], f"{k[0]}{parts[p][0]}")
                    for word, p, k in ((a, one, left), (b, other, right))
                )
                total = f(x, y)
                bits, index = parts[target]
                if form == ".sat":
                    total = saturated(total, f"s{bits}")
                if form == ".add":
                    return int(total + c)
                mask = (1 << bits) - 1 << index
                return c & ~mask | total << index & mask if target else int(total)

            third = ", %3" if target or form == ".add" else ""
            name = f"v{op}.s32.{left}.{right}{form}"
            result.append(_case(name, f"%0{target}, %1{pick_a}, %2{pick_b}{third}", meaning))
    for op, form in itertools.product(_SET, ("", ".add")):

        def compared(a: int, b: int, c: int, f: Any = _SET[op], form: str = form) -> int:
            return int(f(value(a >> 16, "s16"), b & 255)) + (c if form else 0)

        third = ", %3" if form else ""
        result.append(_case(f"vset.s32.u32.{op}{form}", f"%0, %1.h1, %2.b0{third}", compared))
    for op, mode in itertools.product(("vshl", "vshr"), ("clamp", "wrap")):

        def shifted(a: int, b: int, c: int, op: str = op, mode: str = mode) -> int:
            amount = min(b & 255, 32) if mode == "clamp" else b & 31
            return a << amount if op == "vshl" else value(a, "s32") >> amount

        result.append(_case(f"{op}.s32.{'u' if op == 'vshl' else 's'}32.u32.{mode}", "%0, %1, %2.b0", shifted))
    return result


def cases() -> list[Case]:
    """Return all cases."""
    return [*_several(), *_scalar()]

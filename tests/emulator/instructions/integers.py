"""Integer arithmetic, comparisons and moves, defined by Python's integers of any size."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from tests.emulator.instructions.case import Case, assembly, instruction, predicate
from tests.emulator.instructions.exact import on_halves

KINDS = [f"{s}{n}" for n in (16, 32, 64) for s in "us"]


def bits_of(kind: str) -> int:
    return int(kind[1:])


def value(pattern: int, kind: str) -> int:
    """Return the integer value of a pattern."""
    bits = bits_of(kind)
    pattern &= (1 << bits) - 1
    return pattern - (1 << bits) if kind[0] == "s" and pattern >> (bits - 1) else pattern


def on_values(function: Callable[..., int], kind: str) -> Callable[..., int]:
    """Build a function of integers of a type, on their patterns."""
    return lambda *patterns: function(*(value(p, kind) for p in patterns))


def saturated(number: int, kind: str) -> int:
    """To the nearest number of a type."""
    bits = bits_of(kind)
    low, high = (-(1 << bits - 1), (1 << bits - 1) - 1) if kind[0] == "s" else (0, (1 << bits) - 1)
    return min(max(number, low), high)


def _truncated(a: int, b: int) -> int:
    size = abs(a) // abs(b)
    return size if (a < 0) == (b < 0) else -size


def _quotient(a: int, b: int) -> int:
    return _truncated(a, b) if b else -1


def _rest(a: int, b: int) -> int:
    return a - _truncated(a, b) * b if b else -1


def _arithmetic() -> list[Case]:
    result = []
    for kind in KINDS:
        bits = bits_of(kind)
        two: dict[str, Callable[[int, int], int]] = {
            "add": lambda a, b: a + b,
            "sub": lambda a, b: a - b,
            "mul.lo": lambda a, b: a * b,
            "mul.hi": lambda a, b, bits=bits: a * b >> bits,  # type: ignore[misc]
            "min": min,
            "max": max,
        }
        for op, function in two.items():
            result.append(instruction(f"{op}.{kind}", f"{kind} {kind}", kind, on_values(function, kind)))
        for op, function in (("div", _quotient), ("rem", _rest)):
            # The ISA leaves a zero divisor open, and does not define a quotient that is too large.
            result.append(
                instruction(
                    f"{op}.{kind}", f"{kind} {kind}", kind, on_values(function, kind), undefined=lambda a, b: b == 0
                )
            )
        for op in ("lo", "hi"):
            result.append(
                instruction(
                    f"mad.{op}.{kind}",
                    f"{kind} " * 3,
                    kind,
                    on_values(lambda a, b, c, n=bits * (op == "hi"): (a * b >> n) + c, kind),
                )
            )
        if bits < 64:
            wide = f"{kind[0]}{2 * bits}"
            result.append(instruction(f"mul.wide.{kind}", f"{kind} {kind}", wide, on_values(lambda a, b: a * b, kind)))
            result.append(
                instruction(
                    f"mad.wide.{kind}",
                    f"{kind} {kind} {wide}",
                    wide,
                    lambda a, b, c, k=kind, w=wide: value(a, k) * value(b, k) + value(c, w),
                )
            )
        result.append(instruction(f"sad.{kind}", f"{kind} " * 3, kind, on_values(lambda a, b, c: c + abs(a - b), kind)))
        if kind[0] == "s":
            result.append(instruction(f"neg.{kind}", kind, kind, on_values(lambda a: -a, kind)))
            result.append(instruction(f"abs.{kind}", kind, kind, on_values(abs, kind)))
    for op, function in (("add", lambda a, b: a + b), ("sub", lambda a, b: a - b)):
        result.append(
            instruction(
                f"{op}.sat.s32", "s32 s32", "s32", on_values(lambda a, b, f=function: saturated(f(a, b), "s32"), "s32")
            )
        )
    result.append(
        instruction(
            "mad.hi.sat.s32",
            "s32 s32 s32",
            "s32",
            on_values(lambda a, b, c: saturated((a * b >> 32) + c, "s32"), "s32"),
        )
    )
    for kind in ("u16x2", "s16x2"):
        half = kind.removesuffix("x2")
        for op, pair in (("add", lambda a, b: a + b), ("min", min), ("max", max)):
            both = on_halves(lambda a, b, f=pair, k=half: value(f(value(a, k), value(b, k)), "u16"))
            result.append(instruction(f"{op}.{kind}", f"{kind} {kind}", "b32", both))
    for kind, op in itertools.product(("s32", "s16x2"), ("min", "max")):
        choose: Any = min if op == "min" else max
        half = kind.removesuffix("x2")
        clamped = lambda a, b, f=choose, k=half: max(0, f(value(a, k), value(b, k)))  # noqa: E731
        result.append(
            instruction(f"{op}.relu.{kind}", f"{kind} {kind}", "b32", on_halves(clamped) if "x2" in kind else clamped)
        )
    return result


def _low24(a: int, kind: str) -> int:
    a &= 0xFFFFFF
    return a - (1 << 24) if kind == "s32" and a >> 23 else a


def _part24(a: int, b: int, kind: str, part: str) -> int:
    product = _low24(a, kind) * _low24(b, kind)
    return value(product >> 16 if part == "hi" else product, kind)


def _pieces(word: int, kind: str, bits: int) -> list[int]:
    return [value(word >> index, f"{kind[0]}{bits}") for index in range(0, 32, bits)]


def _absolute_differences(left: str, right: str, form: str) -> Case:
    """Return a case of vabsdiff4: of four bytes each, of saturated ones, or their sum added to c."""

    def meaning(a: int, b: int, c: int) -> int:
        results: list[int] = [abs(x - y) for x, y in zip(_pieces(a, left, 8), _pieces(b, right, 8), strict=True)]
        if form == ".add":
            return c + sum(results)
        if form == ".sat":
            results = [min(x, 127 if left == "s32" else 255) for x in results]
        return sum((x & 255) << 8 * n for n, x in enumerate(results))

    return instruction(f"vabsdiff4.{left}.{left}.{right}{form}", "b32 b32 b32", "b32", meaning)


def _products() -> list[Case]:
    result = []
    for kind, part in itertools.product(("u32", "s32"), ("lo", "hi")):
        result.append(
            instruction(
                f"mul24.{part}.{kind}", f"{kind} {kind}", kind, lambda a, b, k=kind, p=part: _part24(a, b, k, p)
            )
        )
        result.append(
            instruction(
                f"mad24.{part}.{kind}", f"{kind} " * 3, kind, lambda a, b, c, k=kind, p=part: _part24(a, b, k, p) + c
            )
        )
    result.append(
        instruction(
            "mad24.hi.sat.s32",
            "s32 s32 s32",
            "s32",
            lambda a, b, c: saturated(_part24(a, b, "s32", "hi") + value(c, "s32"), "s32"),
        )
    )

    for left, right in itertools.product(("u32", "s32"), repeat=2):
        result.append(
            instruction(
                f"dp4a.{left}.{right}",
                "b32 b32 b32",
                "b32",
                lambda a, b, c, p=left, q=right: (
                    c + sum(x * y for x, y in zip(_pieces(a, p, 8), _pieces(b, q, 8), strict=True))
                ),
            )
        )
        for form in ("", ".sat", ".add"):
            result.append(_absolute_differences(left, right, form))
        for part in ("lo", "hi"):
            result.append(
                instruction(
                    f"dp2a.{part}.{left}.{right}",
                    "b32 b32 b32",
                    "b32",
                    lambda a, b, c, p=left, q=right, h=part: (
                        c
                        + sum(
                            x * y
                            for x, y in zip(_pieces(a, p, 16), _pieces(b, q, 8)[2 * (h == "hi") :][:2], strict=True)
                        )
                    ),
                )
            )
    return result


def _carries() -> list[Case]:
    """Return chains of two words; the second result uses the carry of the first."""
    result = []
    for bits in (32, 64):
        kind = f"u{bits}"
        full = (1 << bits) - 1

        def chain(
            first: str,
            second: str,
            count: int,
            meaning: Callable[..., int],
            kind: str = kind,
            bits: int = bits,
            full: int = full,
        ) -> Case:
            ins = (kind,) * (2 * count)
            numbers = [", ".join(f"%{2 + n}" for n in range(start, 2 * count, 2)) for start in (0, 1)]
            text = f"{first}.{kind} %0, {numbers[0]}; {second}.{kind} %1, {numbers[1]};"

            def both(*patterns: int) -> tuple[int, int]:
                whole = meaning(*(patterns[2 * n] | patterns[2 * n + 1] << bits for n in range(count)))
                return whole & full, whole >> bits & full

            return Case(f"{first}.{kind} {second}", assembly(text, ins, (kind, kind)), ins, (kind, kind), both)

        result += [
            chain("add.cc", "addc", 2, lambda a, b: a + b),
            chain("add.cc", "addc.cc", 2, lambda a, b: a + b),
            chain("sub.cc", "subc", 2, lambda a, b: a - b),
        ]

        def product(a: int, b: int, c: int, d: int, bits: int = bits, full: int = full) -> tuple[int, int]:
            total = a * b + (c | d << bits)
            return total & full, total >> bits & full

        text = f"mad.lo.cc.{kind} %0, %2, %3, %4; madc.hi.{kind} %1, %2, %3, %5;"
        ins = (kind,) * 4
        result.append(Case(f"mad.lo.cc.{kind} madc.hi", assembly(text, ins, (kind, kind)), ins, (kind, kind), product))

        def carry_out(a: int, b: int, c: int, bits: int = bits, full: int = full) -> tuple[int, int]:
            total = (a * b >> bits) + c
            return total & full, total >> bits

        text = f"mad.hi.cc.{kind} %0, %2, %3, %4; addc.{kind} %1, 0, 0;"
        result.append(
            Case(f"mad.hi.cc.{kind} addc", assembly(text, ins[:3], (kind, kind)), ins[:3], (kind, kind), carry_out)
        )
        three = f"sub.cc.{kind} %0, %2, %3; subc.cc.{kind} %0, %0, %4; subc.{kind} %1, 0, 0;"

        def borrows(a: int, b: int, c: int, full: int = full) -> tuple[int, int]:
            first = a - b
            second = (first & full) - c - (first < 0)
            return second & full, -(second < 0) & full

        result.append(
            Case(f"sub.cc.{kind} subc.cc subc", assembly(three, ins[:3], (kind, kind)), ins[:3], (kind, kind), borrows)
        )

        # Mixed chains: the machine code's carry of a - b is the carry of a + ~b + 1, and a - b with it a + ~b + carry.
        for first, second in itertools.product(("add.cc", "sub.cc"), ("addc", "subc")):
            if first[:3] == second[:3]:
                continue

            def mixed(a: int, b: int, c: int, d: int, f: str = first, full: int = full) -> tuple[int, int]:
                low = a + (b if f == "add.cc" else (~b & full) + 1)
                high = c + (~d & full if f == "add.cc" else d) + (low > full)
                return low & full, high & full

            text = f"{first}.{kind} %0, %2, %3; {second}.{kind} %1, %4, %5;"
            result.append(
                Case(f"{first}.{kind} then {second}", assembly(text, ins, (kind, kind)), ins, (kind, kind), mixed)
            )
    return result


_COMPARE: dict[str, Callable[[int, int], bool]] = {
    "eq": lambda a, b: a == b, "ne": lambda a, b: a != b, "lt": lambda a, b: a < b, "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b, "ge": lambda a, b: a >= b,
}  # fmt: skip
_UNSIGNED = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}


def _comparisons() -> list[Case]:
    result = []
    for kind in KINDS:
        names = {n: n for n in _COMPARE} | (_UNSIGNED if kind[0] == "u" else {})
        for name, plain in names.items():
            result.append(
                predicate(
                    f"setp.{name}.{kind}",
                    f"{kind} {kind}",
                    on_values(lambda a, b, f=_COMPARE[plain]: int(f(a, b)), kind),
                )
            )
        result.append(instruction(f"selp.{kind}", f"{kind} {kind} bit", kind, lambda a, b, c: a if c else b))
    for bits in (16, 32, 64):
        for name in ("eq", "ne"):
            result.append(
                predicate(f"setp.{name}.b{bits}", f"b{bits} b{bits}", lambda a, b, f=_COMPARE[name]: int(f(a, b)))
            )
    for n, case in enumerate(result):
        if case.name.startswith("selp"):
            text = "{ .reg .pred p; setp.ne.u32 p, %3, 0; " + case.name + " %0, %1, %2, p; }"
            result[n] = Case(
                case.name, assembly(text, case.inputs, case.outputs), case.inputs, case.outputs, case.meaning
            )
    logic: dict[str, Callable[[bool, bool], bool]] = {
        "and": lambda t, c: t and c,
        "or": lambda t, c: t or c,
        "xor": lambda t, c: t != c,
    }
    for name, not_third in itertools.product(logic, ("", "!")):
        # Both predicates: p of the comparison, q of its complement, each combined with (the negation of) a third.
        text = (
            f".reg .pred q, c; .reg .b32 t; setp.ne.u32 c, %3, 0; setp.lt.{name}.s32 p|q, %1, %2, {not_third}c; "
            "selp.u32 t, 2, 0, q; selp.u32 %0, 1, 0, p; or.b32 %0, %0, t;"
        )

        def combined(a: int, b: int, c: int, name: str = name, negate: str = not_third) -> int:
            less, third = value(a, "s32") < value(b, "s32"), bool(c) != bool(negate)
            return int(logic[name](less, third)) | int(logic[name](not less, third)) << 1

        ins = ("s32", "s32", "bit")
        body = assembly(f"{{ .reg .pred p; {text} }}", ins, ("u32",))
        result.append(Case(f"setp.lt.{name}.s32 p|q {not_third}c", body, ins, ("u32",), combined))
    result.append(
        instruction("set.le.u32.s32", "s32 s32", "u32", lambda a, b: -int(value(a, "s32") <= value(b, "s32")))
    )
    result.append(instruction("set.hi.f32.u32", "u32 u32", "b32", lambda a, b: 0x3F80_0000 if a > b else 0))
    result.append(instruction("slct.u64.s32", "u64 u64 s32", "u64", lambda a, b, c: a if value(c, "s32") >= 0 else b))
    return result


def _moves() -> list[Case]:
    def moved(name: str, text: str, ins: tuple[str, ...], outs: tuple[str, ...], meaning: Callable[..., Any]) -> Case:
        return Case(f"mov.{name}", assembly(f"mov.{name.split()[0]} {text};", ins, outs), ins, outs, meaning)

    words, halves, wide = ("b32", "b32"), ("b16",) * 4, ("b64",)
    lanes = Case("mov.u32 %laneid", 'asm("mov.u32 %0, %%laneid;" : "=r"(d0));', ("u32",), ("u32",),
                 lambda rows: list(range(32)), of_warp=True)  # fmt: skip
    return [
        moved("b64 pack", "%0, {%1, %2}", words, wide, lambda a, b: a | b << 32),
        moved("b64 unpack", "{%0, %1}, %2", wide, words, lambda a: (a, a >> 32)),
        moved("b32 pack", "%0, {%1, %2}", halves[:2], words[:1], lambda a, b: a | b << 16),
        moved("b32 unpack", "{%0, %1}, %2", words[:1], halves[:2], lambda a: (a, a >> 16)),
        moved("b64 pack4", "%0, {%1, %2, %3, %4}", halves, wide, lambda *v: sum(x << 16 * n for n, x in enumerate(v))),
        lanes,
    ]


def _packs() -> list[Case]:
    """Return cases of cvt.pack: two saturated integers below the bits of a third one."""
    result = []
    for kind in ("u16", "s16", "u8", "s8"):
        bits = bits_of(kind)

        def packed(a: int, b: int, c: int = 0, kind: str = kind, bits: int = bits) -> int:
            high, low = (saturated(value(x, "s32"), kind) & (1 << bits) - 1 for x in (a, b))
            return c << 2 * bits | high << bits | low

        ins = "s32 s32" if bits == 16 else "s32 s32 b32"
        name = f"cvt.pack.sat.{kind}.s32" + ("" if bits == 16 else ".b32")
        result.append(instruction(name, ins, "b32", packed))
    return result


def cases() -> list[Case]:
    """Return all cases."""
    return [
        *_arithmetic(), *_products(), *_carries(), *_comparisons(), *_moves(), *_packs(),
    ]  # fmt: skip

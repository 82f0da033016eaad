"""Instructions on bits, defined bit by bit."""

from __future__ import annotations

import itertools
from typing import Any

from tests.emulator.instructions.case import Case, assembly, instruction, predicate
from tests.emulator.instructions.integers import value


def _logic() -> list[Case]:
    result = []
    for bits in (16, 32, 64):
        kind = f"b{bits}"
        for op, two in (("and", lambda a, b: a & b), ("or", lambda a, b: a | b), ("xor", lambda a, b: a ^ b)):
            result.append(instruction(f"{op}.{kind}", f"{kind} {kind}", kind, two))
        result.append(instruction(f"not.{kind}", kind, kind, lambda a: ~a))
        result.append(instruction(f"cnot.{kind}", kind, kind, lambda a: int(a == 0)))
        result.append(instruction(f"shl.{kind}", f"{kind} amount", kind, lambda a, n, w=bits: a << min(n, w)))
        result.append(instruction(f"shr.u{bits}", f"{kind} amount", kind, lambda a, n: a >> n))
        result.append(instruction(f"shr.s{bits}", f"{kind} amount", kind, lambda a, n, k=f"s{bits}": value(a, k) >> n))
    for op, two in (("and", lambda a, b: a & b), ("or", lambda a, b: a | b), ("xor", lambda a, b: a ^ b)):
        text = f".reg .pred q; setp.ne.u32 p, %1, 0; setp.ne.u32 q, %2, 0; {op}.pred p, p, q;"
        result.append(predicate(f"{op}.pred", "bit bit", two, text))
    result.append(predicate("not.pred", "bit", lambda a: 1 - a, "setp.ne.u32 p, %1, 0; not.pred p, p;"))
    for lut in (0x00, 0x1B, 0x80, 0x96, 0xCA, 0xE8, 0xFE, 0xFF):

        def looked_up(a: int, b: int, c: int, lut: int = lut) -> int:
            return sum((lut >> ((a >> n & 1) << 2 | (b >> n & 1) << 1 | c >> n & 1) & 1) << n for n in range(32))

        ins = ("b32",) * 3
        text = f"lop3.b32 %0, %1, %2, %3, {lut};"
        result.append(Case(f"lop3.b32 {lut:#04x}", assembly(text, ins, ("b32",)), ins, ("b32",), looked_up))
    for op, lut, chosen in (("or", 0x80, any), ("and", 0xE8, all), ("and", 0x96, all), ("or", 0x00, any)):

        def with_flag(a: int, b: int, c: int, q: int, lut: int = lut, f: Any = chosen) -> tuple[int, int]:
            result = sum((lut >> ((a >> n & 1) << 2 | (b >> n & 1) << 1 | c >> n & 1) & 1) << n for n in range(32))
            return result, int(f((result != 0, q != 0)))

        supplied = ("b32", "b32", "b32", "bit")
        text = f".reg .pred p, q; setp.ne.u32 q, %5, 0; lop3.{op}.b32 %0|p, %2, %3, %4, {lut}, q; selp.u32 %1, 1, 0, p;"
        text = f"{{ {text} }}"
        result.append(
            Case(
                f"lop3.{op}.b32 {lut:#04x}",
                assembly(text, supplied, ("b32", "u32")),
                supplied,
                ("b32", "u32"),
                with_flag,
            )
        )

    def nth(mask: int, base: int, offset: int) -> int:
        index, n = base, value(offset, "s32")
        if n == 0:
            return index if mask >> index & 1 else -1
        if n == -(2**31):
            return 0  # GPU behaviour; the ISA does not define it
        places = range(index, 32) if n > 0 else range(index, -1, -1)
        bits = [p for p in places if mask >> p & 1]
        return bits[abs(n) - 1] if abs(n) <= len(bits) else -1

    result.append(
        Case(
            "fns.b32",
            assembly(
                "{ .reg .b32 t; and.b32 t, %2, 31; fns.b32 %0, %1, t, %3; }", ("b32", "u32", "few_signed"), ("u32",)
            ),
            ("b32", "u32", "few_signed"),
            ("u32",),
            lambda a, b, c: nth(a, b & 31, c),
        )
    )
    for side, mode in itertools.product("lr", ("clamp", "wrap")):

        def funnel(a: int, b: int, c: int, side: str = side, mode: str = mode) -> int:
            n = min(c, 32) if mode == "clamp" else c % 32
            return (b << 32 | a) << n >> 32 if side == "l" else (b << 32 | a) >> n

        result.append(instruction(f"shf.{side}.{mode}.b32", "b32 b32 amount", "b32", funnel))
    return result


# The byte that each mode of prmt puts in each place, as the ISA's table writes it: b3 b2 b1 b0 for selectors 0 to 3.
_PERMUTE = {
    "f4e": ("3210", "4321", "5432", "6543"), "b4e": ("5670", "6701", "7012", "0123"),
    "rc8": ("0000", "1111", "2222", "3333"), "ecl": ("3210", "3211", "3222", "3333"),
    "ecr": ("0000", "1110", "2210", "3210"), "rc16": ("1010", "3232", "1010", "3232"),
}  # fmt: skip


def _permuted(a: int, b: int, digits: list[int]) -> int:
    data = a.to_bytes(4, "little") + b.to_bytes(4, "little")
    picked = [data[d & 7] if d < 8 else 255 * (data[d & 7] >> 7) for d in digits]
    return int.from_bytes(bytes(picked), "little")


def _fields() -> list[Case]:
    result = [
        instruction(
            "prmt.b32", "b32 b32 nibbles", "b32", lambda a, b, c: _permuted(a, b, [c >> 4 * n & 15 for n in range(4)])
        )
    ]
    for mode, rows in _PERMUTE.items():
        result.append(
            instruction(
                f"prmt.b32.{mode}",
                "b32 b32 b32",
                "b32",
                lambda a, b, c, rows=rows: _permuted(a, b, [int(d) for d in reversed(rows[c & 3])]),
            )
        )
    for bits in (32, 64):
        # The ISA uses the low 8 bits of positions and lengths. So does an H100 for 32 bits (2026-11-21). For 64 bits
        # ptxas uses shifts by the whole amount.
        amounts = 0xFF if bits == 32 else 0xFFFF_FFFF

        def insert(a: int, b: int, c: int, d: int, bits: int = bits, amounts: int = amounts) -> int:
            position, length = c & amounts, d & amounts
            for n in range(min(length, bits)):
                if position + n < bits:
                    b = b & ~(1 << position + n) | (a >> n & 1) << position + n
            return b

        result.append(instruction(f"bfi.b{bits}", f"b{bits} b{bits} amount amount", f"b{bits}", insert))
        for kind in (f"u{bits}", f"s{bits}"):

            def extract(a: int, b: int, c: int, bits: int = bits, kind: str = kind, amounts: int = amounts) -> int:
                position, length = b & amounts, c & amounts
                sign = 0
                if kind[0] == "s" and length:
                    sign = a >> min(position + length - 1, bits - 1) & 1
                return sum(
                    (a >> position + n & 1 if n < length and position + n < bits else sign) << n for n in range(bits)
                )

            result.append(instruction(f"bfe.{kind}", f"{kind} amount amount", kind, extract))

            def highest(a: int, bits: int = bits, kind: str = kind) -> int:
                size = ~value(a, kind) if value(a, kind) < 0 else value(a, kind)
                return size.bit_length() - 1

            result.append(instruction(f"bfind.{kind}", kind, "u32", highest))
            result.append(
                instruction(
                    f"bfind.shiftamt.{kind}",
                    kind,
                    "u32",
                    lambda a, f=highest, n=bits: n - 1 - f(a) if f(a) >= 0 else -1,
                )
            )
        result.append(instruction(f"popc.b{bits}", f"b{bits}", "u32", lambda a: bin(a).count("1")))
        result.append(instruction(f"clz.b{bits}", f"b{bits}", "u32", lambda a, n=bits: n - a.bit_length()))
        result.append(
            instruction(f"brev.b{bits}", f"b{bits}", f"b{bits}", lambda a, n=bits: int(f"{a:0{n}b}"[::-1], 2))
        )
    for mode in ("clamp", "wrap"):

        def mask(a: int, b: int, mode: str = mode) -> int:
            start, count = (a, min(b, 32)) if mode == "clamp" else (a % 32, b % 32)
            return sum(1 << n for n in range(32) if start <= n < start + count)

        result.append(instruction(f"bmsk.{mode}.b32", "amount amount", "b32", mask))
        for kind in ("u32", "s32"):

            def extended(a: int, b: int, kind: str = kind, mode: str = mode) -> int:
                count = min(b, 32) if mode == "clamp" else b % 32
                return value(a, f"{kind[0]}{count}") if count else 0

            result.append(instruction(f"szext.{mode}.{kind}", f"{kind} amount", kind, extended))
    return result


def cases() -> list[Case]:
    """Return all cases."""
    return [*_logic(), *_fields()]

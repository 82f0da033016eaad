"""PTX entries: an instruction on rows of operands, one thread per row, or a complete module.

The meaning of an instruction is a function of Python's integers and floats, after the PTX ISA.
"""

from __future__ import annotations

import itertools
import re
import struct
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.emulator.corpus.entry import Args, Builder, Entry, Extent, Out, Rng, declare, extent

HEADER = ".version 8.6\n.target {target}\n.address_size 64\n"
ROWS = 192
_BLOCK = 64
_WIDTH = {"pred": 1}
_INTEGERS = (0, 1, 2, 7, 31, 32, 33, 63, 64, 127, 128, 255, 256, 32767, 32768, 65535)
_FLOATS = (0.0, -0.0, 1.0, -1.0, 0.5, 1.5, 2.5, -2.5, 3.0, 1e9, -1e9, 1e-3, 65504.0, 448.0, 2147483648.0)


def width(kind: str) -> int:
    """Bits of a type."""
    return 32 if kind.endswith("x2") else int(re.sub(r"\D", "", kind))


def _register(kind: str) -> str:
    """Return the type of the register and of the access that hold a type: 8 bits travel in 16."""
    return f".b{max(16, width(kind))}" if kind[0] != "f" or width(kind) == 16 or kind.endswith("x2") else f".{kind}"


def pool(rng: Rng, kind: str) -> list[int]:
    """Bit patterns of a type: its edges, then random ones."""
    bits = width(kind)
    mask = (1 << bits) - 1
    if kind in ("f32", "f64", "f16", "bf16"):
        result = [encode(kind, v) for v in (*_FLOATS, float("inf"), -float("inf"), float("nan"))]
        result += [encode(kind, float(v)) for v in rng.standard_normal(40) * 10.0 ** rng.integers(-4, 5, 40)]
        least, limit = 1, encode(kind, float("inf")) - 1
        return [
            *result,
            least,
            least | 1 << (bits - 1),
            limit,
            limit | 1 << (bits - 1),
            encode(kind, float("inf")) >> 1,
        ]
    result = [v & mask for v in _INTEGERS] + [-v & mask for v in _INTEGERS] + [mask >> 1, (mask >> 1) + 1]
    return result + [int.from_bytes(rng.bytes(8), "little") & mask for _ in range(40)]


def decode(kind: str, bits: int) -> Any:
    """Decode a bit pattern to the argument of a meaning: an int, signed for signed types, or a float."""
    if kind == "f32":
        return struct.unpack("<f", struct.pack("<I", bits))[0]
    if kind == "f64":
        return struct.unpack("<d", struct.pack("<Q", bits))[0]
    if kind == "f16":
        return struct.unpack("<e", struct.pack("<H", bits))[0]
    if kind == "bf16":
        return struct.unpack("<f", struct.pack("<I", bits << 16))[0]
    if kind[0] == "s" and bits >> (width(kind) - 1):
        return bits - (1 << width(kind))
    return bits


def encode(kind: str, value: Any) -> int:
    """Return the bit pattern of a number, rounded once to nearest even where the type is a float's."""
    if kind in ("f32", "f64", "f16", "bf16"):
        return _round(kind, value)
    return int(value) & ((1 << width(kind)) - 1)


_FORMATS = {"f16": (5, 10), "bf16": (8, 7), "f32": (8, 23), "f64": (11, 52)}


def _round(kind: str, value: Any, mode: str = "rn") -> int:
    exponent_bits, fraction_bits = _FORMATS[kind]
    bias = (1 << (exponent_bits - 1)) - 1
    top = ((1 << exponent_bits) - 1) << fraction_bits
    sign_bit = 1 << (exponent_bits + fraction_bits)
    if isinstance(value, float) and value != value:
        return top | 1 << (fraction_bits - 1)
    if isinstance(value, float) and value in (float("inf"), -float("inf")):
        return top | (sign_bit if value < 0 else 0)
    negative = value < 0 or (isinstance(value, float) and np.signbit(value))
    size = abs(Fraction(value))
    if size == 0:
        return sign_bit if negative else 0
    exponent = 0
    while size / Fraction(2) ** exponent >= 2:
        exponent += 1
    while size / Fraction(2) ** exponent < 1 and exponent > 1 - bias:
        exponent -= 1
    exponent = max(exponent, 1 - bias)
    scaled = size / Fraction(2) ** (exponent - fraction_bits)
    whole = scaled.numerator // scaled.denominator
    remainder = scaled - whole
    up = {
        "rn": remainder > Fraction(1, 2) or (remainder == Fraction(1, 2) and whole & 1),
        "rz": False,
        "rm": negative and remainder > 0,
        "rp": not negative and remainder > 0,
    }[mode]
    whole += bool(up)
    bits = whole + ((exponent + bias - 1) << fraction_bits)
    if bits >= top:
        outward = mode == "rn" or (mode == "rm" and negative) or (mode == "rp" and not negative)
        bits = top if outward else top - 1
    return bits | (sign_bit if negative else 0)


def rounded(kind: str, value: Any, mode: str = "rn") -> float:
    """Return a number rounded once to a format: a Fraction, an int or a float."""
    return decode(kind, _round(kind, value, mode))  # type: ignore[no-any-return]


def _same(kinds: str, expected: NDArray[Any], rtol: float, atol: float) -> Callable[[NDArray[Any]], str]:
    """Equal bits, or both NaN, or within ``rtol`` or ``atol``."""

    def check(result: NDArray[Any]) -> str:
        for n, (a, b) in enumerate(zip(result.ravel().tolist(), expected.ravel().tolist(), strict=True)):
            if a == b:
                continue
            if kinds in _FORMATS:
                u, v = decode(kinds, a), decode(kinds, b)
                if (u != u and v != v) or (rtol and abs(u - v) <= max(rtol * abs(v), rtol * 2.0**-126, atol)):
                    continue
                return f"row {n}: {u!r} ({a:#x}), not {v!r} ({b:#x})"
            return f"row {n}: {a:#x}, not {b:#x}"
        return ""

    return check


def ptx(
    name: str,
    body: str,
    ins: str,
    outs: str,
    meaning: Callable[..., Any],
    *,
    rows: Sequence[Sequence[int]] | None = None,
    rtol: float = 0.0,
    atol: float = 0.0,
    before: str = "",
    target: str = "sm_90a",
    refused: str = "",
) -> Entry:
    """Declare an instruction.

    body: PTX from %a, %b, %c (types ``ins``) to %d, %e, ... (types ``outs``). meaning: computes ``outs`` from ``ins``;
    float results are rounded once. rows: bit patterns to use instead of the pools'.
    """
    kinds_in, kinds_out = ins.split(), outs.split()
    letters_in, letters_out = "abcfgh"[: len(kinds_in)], "dexyz"[: len(kinds_out)]
    lines = [HEADER.format(target=target), before, ".visible .entry k("]
    lines.append(",\n".join(f"  .param .u64 p{n}" for n in range(len(kinds_in) + len(kinds_out))) + "\n)\n{")
    lines.append("  .reg .b64 %at<16>;\n  .reg .b32 %row<4>;\n  .reg .pred %p, %q;")
    for letter, kind in zip(letters_in + letters_out, kinds_in + kinds_out, strict=True):
        lines.append(f"  .reg {_register(kind)} %{letter};")
    lines.append("  mov.u32 %row0, %ctaid.x;\n  mov.u32 %row1, %ntid.x;\n  mov.u32 %row2, %tid.x;")
    lines.append("  mad.lo.u32 %row3, %row0, %row1, %row2;")
    for n, kind in enumerate(kinds_in + kinds_out):
        lines.append(f"  ld.param.u64 %at{n}, [p{n}];\n  cvta.to.global.u64 %at{n}, %at{n};")
        lines.append(f"  mad.wide.u32 %at{n}, %row3, {max(16, width(kind)) // 8}, %at{n};")
    for n, (letter, kind) in enumerate(zip(letters_in, kinds_in, strict=True)):
        lines.append(f"  ld.global{_register(kind)} %{letter}, [%at{n}];")
    lines += [f"  {line}" for line in body.strip().splitlines()]
    for n, (letter, kind) in enumerate(zip(letters_out, kinds_out, strict=True), len(kinds_in)):
        lines.append(f"  st.global{_register(kind)} [%at{n}], %{letter};")
    lines.append("  ret;\n}")

    def build(rng: Rng) -> Args:
        chosen = rows
        if chosen is None:
            pools = [pool(rng, kind) for kind in kinds_in]
            several = list(itertools.product(*(p[:: max(1, len(p) // 12)] for p in pools))) if len(pools) > 1 else []
            rng.shuffle(several)
            chosen = several[: ROWS // 2]
            if len(pools) == 1:
                chosen = [(v,) for v in pools[0]]
            while len(chosen) < ROWS:
                chosen.append(tuple(int(rng.choice(np.array(p, np.uint64))) for p in pools))
        whole = [row for row in chosen][:ROWS]
        while len(whole) < ROWS:
            whole.append(whole[len(whole) % len(chosen)])
        results = []
        for row in whole:
            got = meaning(*(decode(kind, bits) for kind, bits in zip(kinds_in, row, strict=True)))
            results.append(got if isinstance(got, tuple) else (got,))
        arrays: list[Any] = []
        for n, kind in enumerate(kinds_in):
            arrays.append(np.array([row[n] for row in whole], f"u{max(16, width(kind)) // 8}"))
        for n, kind in enumerate(kinds_out):
            expected = np.array([encode(kind, row[n]) for row in results], f"u{max(16, width(kind)) // 8}")
            arrays.append(Out(expected, check=_same(kind, expected, rtol, atol)))
        return tuple(arrays)

    source = "\n".join(lines)
    grid = extent(ROWS // _BLOCK)
    return declare(Entry(name, "ptx", source, build, grid, (_BLOCK, 1, 1), target=target, refused=refused))


def module(
    source: str, grid: Extent = 1, block: Extent = 32, smem: int = 0, target: str = "sm_90a", refused: str = ""
) -> Callable[[Builder], Entry]:
    """Declare a whole module and add its header; the decorated function builds its parameters and names it."""

    def add(build: Builder) -> Entry:
        text = HEADER.format(target=target) + source.lstrip("\n")
        name = build.__name__
        return declare(Entry(name, "ptx", text, build, extent(grid), extent(block), smem, target, refused=refused))

    return add

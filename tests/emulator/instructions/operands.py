"""Operands to try an instruction on: the edges of each type, and random ones that come near to other edges."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Column = NDArray[np.uint64]
Draw = Callable[[np.random.Generator, int], Column]

#: Exponent and fraction bits of the floating-point types.
LAYOUTS = {"f16": (5, 10), "bf16": (8, 7), "f32": (8, 23), "f64": (11, 52)}


@dataclass(frozen=True)
class Pool:
    """Operands of a type: its edges, as bit patterns, and a function that draws random ones."""

    kind: str
    edges: tuple[int, ...]
    draw: Draw


def _float_edges(kind: str) -> tuple[int, ...]:
    """Zeros, subnormals, normals next to them, ones and halves, the largest, infinities, quiet and signaling NaN."""
    exponent_bits, fraction = LAYOUTS[kind]
    sign, one, inf = 1 << exponent_bits + fraction, (2 ** (exponent_bits - 1) - 1) << fraction, 2**exponent_bits - 1
    unit, infinity = 1 << fraction, inf << fraction
    positive = [
        0, 1, 2, 3, unit - 1, unit // 2, unit, unit + 1, 2 * unit - 1, 2 * unit,  # subnormal and small
        one - unit, one - 1, one, one + 1, one + unit // 2, one + unit, one + unit + 1,  # 0.5 ... 2
        one + (fraction << fraction), one + ((fraction + 1) << fraction),  # where the last bit is worth 1 or 2
        one - ((fraction + 1) << fraction), one - ((fraction + 2) << fraction) + 1,  # half of 1's last bit
        infinity - unit, infinity - 1, infinity, infinity + 1, infinity + unit // 2, infinity + unit - 1,
    ]  # fmt: skip
    return tuple(dict.fromkeys(p | s for p in positive for s in (0, sign)))


def _random_float(kind: str) -> Draw:
    """Half of any exponent, half near 1; fractions end in zeros of random number, so that ties are frequent."""
    exponent_bits, fraction = LAYOUTS[kind]

    def draw(rng: np.random.Generator, count: int) -> Column:
        middle, top = 2 ** (exponent_bits - 1) - 1, 2**exponent_bits
        near = rng.integers(max(0, middle - 14), min(top, middle + 14), count)
        exponent = np.where(rng.random(count) < 0.5, near, rng.integers(0, top, count)).astype(np.uint64)
        bits = rng.integers(0, 2**fraction, count, dtype=np.uint64)
        cleared = rng.integers(0, fraction + 1, count).astype(np.uint64)
        bits = bits >> cleared << cleared
        sign = rng.integers(0, 2, count).astype(np.uint64)
        return (sign << np.uint64(exponent_bits + fraction)) | (exponent << np.uint64(fraction)) | bits

    return draw


def _integer_edges(bits: int) -> tuple[int, ...]:
    top, full = 1 << (bits - 1), (1 << bits) - 1
    values = [0, 1, 2, 3, 7, 8, 15, 16, 31, 32, 100, 127, 128, 255, top, top - 1, top + 1, top // 2, full, full - 1]
    values += [full - 6, full - 127, full - 255, full // 3, full // 3 * 2, 1 << (bits // 2), (1 << (bits // 2)) - 1]
    return tuple(dict.fromkeys(v & full for v in values))


def _random_integer(bits: int) -> Draw:
    """Integers of any size: as many with few bits as with many, of both signs."""

    def draw(rng: np.random.Generator, count: int) -> Column:
        value = rng.integers(0, 2**64, count, dtype=np.uint64) >> rng.integers(64 - bits, 64, count).astype(np.uint64)
        value = np.where(rng.random(count) < 0.5, value, ~value)
        return np.asarray(value & np.uint64(2**bits - 1))

    return draw


def _uniform(low: int, high: int) -> Draw:
    return lambda rng, count: rng.integers(low, high, count, dtype=np.uint64)


def _pair(kind: str) -> Pool:
    """Two 16-bit operands in a register."""
    element = POOLS[kind]
    edges = element.edges

    def draw(rng: np.random.Generator, count: int) -> Column:
        low, high = (
            np.where(rng.random(count) < 0.3, rng.choice(np.array(edges, np.uint64), count), element.draw(rng, count))
            for _ in range(2)
        )
        return np.asarray(low | high << np.uint64(16))

    return Pool("b32", tuple(a | edges[(7 * n + 3) % len(edges)] << 16 for n, a in enumerate(edges)), draw)


def _patterns(values: Any, dtype: type) -> Column:
    """Return the bit patterns of numbers in a NumPy type of 16, 32 or 64 bits."""
    result: NDArray[Any] = np.asarray(values, np.float64).astype(dtype)
    return result.view(f"u{result.dtype.itemsize}").astype(np.uint64)


def _bits_of(values: Sequence[float], dtype: type = np.float32) -> tuple[int, ...]:
    """Return the bit patterns of numbers and of their opposites."""
    return tuple(dict.fromkeys(int(b) for b in _patterns([s * v for v in values for s in (1, -1)], dtype)))


def _uniform_float(low: float, high: float, dtype: type = np.float32) -> Draw:
    return lambda rng, count: _patterns(rng.uniform(low, high, count), dtype)


def _normal(dtype: type) -> Draw:
    return lambda rng, count: _patterns(rng.standard_normal(count), dtype)


def _whole(dtype: type) -> Draw:
    """Small whole numbers: products and sums of some of them are exact in any order."""
    return lambda rng, count: _patterns(rng.integers(-8, 9, count), dtype)


def _two(draw: Draw) -> Draw:
    """Two numbers of 16 bits in a register."""
    return lambda rng, count: draw(rng, count) | draw(rng, count) << np.uint64(16)


def _eighths(rng: np.random.Generator, count: int) -> Column:
    """Multiples of 1/32 of a power of two in the range of the 8-bit formats, so that ties are frequent."""
    return _patterns(rng.integers(-64, 65, count) / 32 * 2.0 ** rng.integers(-18, 17, count), np.float32)


def _random_double_near_f32(rng: np.random.Generator, count: int) -> Column:
    """Return float64 close to float32 numbers, to midpoints between them, and to integers."""
    base = rng.standard_normal(count) * 2.0 ** rng.integers(-150, 130, count)
    with np.errstate(over="ignore", invalid="ignore"):
        single = base.astype(np.float32).astype(np.float64)
        step = np.abs(np.spacing(single.astype(np.float32)).astype(np.float64))
    shifts = rng.choice([0.0, 0.5, 0.5 + 2.0**-20, 0.5 - 2.0**-20, 2.0**-28, 0.25], count)
    return _patterns(single + shifts * step, np.float64)


_AMOUNTS = (*range(34), 40, 47, 48, 62, 63, 64, 65, 96, 127, 128, 129, 255, 256, 257, 1 << 31, 2**32 - 1)
# Numbers on both sides of the limits of each integer type, and halves.
_LIMITS = [
    0.25, 0.49999997, 0.5, 0.75, 1.5, 2.5, 126.5, 127.5, 128.5, 255.5, 32767.5, 65535.5, 2**23 + 0.5, 2.0**31,
    2.0**31 - 128, 2.0**32, 2.0**32 - 256, 2.0**63, 2.0**63 - 2.0**39, 2.0**64, 2.0**64 - 2.0**40, 1e30,
]  # fmt: skip
_WIDE_LIMITS = [
    0.5, 1.5, 2.5, 127.5, 2.0**31 - 0.5, 2.0**31, 2.0**32 - 0.5, 2.0**32, 2.0**53 + 2, 2.0**63, 2.0**63 - 1024, 2.0**64,
    2.0**64 - 2048, 1e300, 2.0**-127, 2.0**-149, 2.0**-150, 2.0**128 - 2.0**103, 2.0**-126 - 2.0**-150,
    2.0**-126 - 2.0**-151, 2.0**-126 - 2.0**-152,  # limits of float32's subnormal numbers under rounding
]  # fmt: skip
# Around the smallest and the largest numbers of E4M3 and E5M2, and ties between their numbers.
_EIGHT = [
    0.0, 2**-6, 2**-7, 2**-9, 2**-10, 3 * 2**-11, 2**-14, 2**-16, 2**-17, 3 * 2**-18, 447, 448, 449, 464, 465, 480,
    57344, 61440, 61441, 65504, 65520, 1e6, np.inf, np.nan, 1.0625, 1.1875, 1.125, 1.25, 1.375,
]  # fmt: skip
_EXPONENTS = [126, 126.5, 149, 149.5, 150, 151, 127, 127.99999, 128]

_SINGLE = _float_edges("f32")
#: Angles with an error bound in the ISA: specials and angles up to 2 pi.
_SMALL_ANGLES = tuple(b for b in _SINGLE if b & 0x7FFF_FFFF < 0x40C0_0000 or b & 0x7F80_0000 == 0x7F80_0000)

POOLS: dict[str, Pool] = {
    **{kind: Pool(kind, _float_edges(kind), _random_float(kind)) for kind in LAYOUTS},
    **{f"{s}{n}": Pool(f"{s}{n}", _integer_edges(n), _random_integer(n)) for s in "sub" for n in (8, 16, 32, 64)},
    "amount": Pool("u32", _AMOUNTS, _uniform(0, 80)),
    "bit": Pool("u32", (0, 1), _uniform(0, 2)),
    "nibbles": Pool("u32", (0x3210, 0x7654, 0xFEDC, 0xBA98, 0x5140, 0, 2**32 - 1), _uniform(0, 2**16)),
    "lane": Pool("u32", (0, 1, 2, 15, 16, 30, 31, 32, 33, 63, 2**32 - 1), _uniform(0, 64)),
    "few": Pool("u32", (0, 1, 2), _uniform(0, 3)),
    "few_signed": Pool("s32", (0, 1, 2, 2**32 - 1, 2**32 - 2, 40, 2**31), lambda rng, count: _few_signed(rng, count)),
    "few64": Pool("u64", (), lambda rng, count: _uniform(0, 3)(rng, count) << np.uint64(32)),
    "votes": Pool("u32", (), lambda rng, count: _votes(rng, count)),
    "votes64": Pool("u64", (), lambda rng, count: _votes(rng, count) << np.uint64(32)),
    "angle": Pool("f32", _SMALL_ANGLES, _uniform_float(-6.28, 6.28)),
    "wide_angle": Pool("f32", _bits_of([0, 6.3, 100, 314]), _uniform_float(-314, 314)),
    "exponent": Pool("f32", (*_SINGLE, *_bits_of(_EXPONENTS)), _uniform_float(-155, 130)),
    "half_exponent": Pool("f16", _float_edges("f16"), _uniform_float(-26, 17, np.float16)),
    "half_exponents": Pool("b32", (0x3C00_3C00, 0x7C00_FC00, 0x7E00_8000), _two(_uniform_float(-26, 17, np.float16))),
    "to_integer": Pool("f32", (*_SINGLE, *_bits_of(_LIMITS)), _random_float("f32")),
    "double_to_integer": Pool(
        "f64", (*_float_edges("f64"), *_bits_of(_WIDE_LIMITS, np.float64)), _random_double_near_f32
    ),
    "to_eight": Pool("f32", tuple(dict.fromkeys((*_bits_of(_EIGHT), *_SINGLE[:20]))), _eighths),
    "small": Pool("f32", (), _whole(np.float32)),
    "small_halves": Pool("b32", (), _two(_whole(np.float16))),
    "small_brains": Pool("b32", (), lambda rng, count: _two(_brains)(rng, count)),
    "small_singles": Pool("b32", (), _whole(np.float32)),
    "small_doubles": Pool("b64", (), _whole(np.float64)),
    "small_e4m3": Pool("b32", (), lambda rng, count: _four_bytes(rng, count, (0, 0x38, 0x40, 0x44, 0x48, 0x30))),
    "small_e5m2": Pool("b32", (), lambda rng, count: _four_bytes(rng, count, (0, 0x3C, 0x40, 0x42, 0x44, 0x38))),
    "unit": Pool("f32", (), _normal(np.float32)),
    "unit_halves": Pool("b32", (), _two(_normal(np.float16))),
}
POOLS |= {f"{kind}x2": _pair(kind) for kind in ("f16", "bf16", "u16", "s16")}


def _votes(rng: np.random.Generator, count: int) -> Column:
    """0 in some warps, 1 in some, and in the others either."""
    whole = np.repeat(rng.integers(0, 4, -(-count // 32)), 32)[:count]
    return np.where(whole < 2, whole, rng.integers(0, 2, count)).astype(np.uint64)


def _few_signed(rng: np.random.Generator, count: int) -> Column:
    return np.asarray(rng.integers(-12, 13, count).astype(np.uint64) & np.uint64(2**32 - 1))


def _brains(rng: np.random.Generator, count: int) -> Column:
    """Small whole numbers in bfloat16."""
    return _whole(np.float32)(rng, count) >> np.uint64(16)


def _four_bytes(rng: np.random.Generator, count: int, sizes: Sequence[int]) -> Column:
    """Four 8-bit floats in a register: 0, 0.5 to 4 and their opposites."""
    codes = rng.choice(np.array(sizes, np.uint64), (count, 4)) | rng.integers(0, 2, (count, 4)).astype(np.uint64) << 7
    return np.asarray((codes << (np.arange(4, dtype=np.uint64) * np.uint64(8))).sum(axis=1, dtype=np.uint64))


def _related(kinds: Sequence[str], rows: list[Column], rng: np.random.Generator) -> None:
    """Make some of the last operands almost cancel, or be half of the last bit of, the result of the others."""
    kind = POOLS[kinds[-1]].kind
    if len(kinds) < 2 or kind not in LAYOUTS or any(POOLS[k].kind != kind for k in kinds):
        return
    exponent_bits, fraction = LAYOUTS[kind]
    count = len(rows[0])
    part = slice(count // 2, count // 2 + count // 4)
    dtype, unsigned = {"f16": (np.float16, np.uint16), "f32": (np.float32, np.uint32), "f64": (np.float64, np.uint64),
                       "bf16": (np.float32, np.uint32)}[kind]  # fmt: skip
    up = np.uint64(16 if kind == "bf16" else 0)
    with np.errstate(all="ignore"):
        numbers = [(r[part] << up).astype(unsigned).view(dtype).astype(np.float64) for r in rows]
        first = numbers[0] * numbers[1] if len(kinds) == 3 else numbers[0]
        scale = rng.choice([1.0, 2.0 ** -(fraction + 1), 2.0 ** -(fraction + 2), 2.0**-fraction], len(first))
        near = (-first * scale).astype(dtype).view(unsigned).astype(np.uint64) >> up
    nudged = near + rng.integers(-1, 2, len(first)).astype(np.uint64)
    rows[-1][part] = nudged & np.uint64(2 ** (1 + exponent_bits + fraction) - 1)


def columns(kinds: Sequence[str], count: int, rng: np.random.Generator) -> list[Column]:
    """Bit patterns of ``count`` rows: all combinations of edges as far as half of the rows hold them, then random."""
    pools = [POOLS[k] for k in kinds]
    rows = [p.draw(rng, count) for p in pools]
    # Use a random subset if there are too many combinations.
    combinations = int(np.prod([len(p.edges) for p in pools], dtype=np.float64))
    used = min(count // 2, combinations)
    if combinations <= count // 2:
        picks = np.unravel_index(np.arange(combinations), [len(p.edges) for p in pools])
    else:
        picks = tuple(rng.integers(0, len(p.edges), used) for p in pools)
    for row, pool, pick in zip(rows, pools, picks, strict=True):
        row[:used] = np.array(pool.edges, np.uint64)[pick]
    _related(kinds, rows, rng)
    if not all(p.edges for p in pools):
        return rows
    mixed = slice(count - count // 8, count)  # one operand an edge, the others random
    for n in range(mixed.start, mixed.stop):
        which = int(rng.integers(0, len(pools)))
        rows[which][n] = pools[which].edges[int(rng.integers(0, len(pools[which].edges)))]
    return rows

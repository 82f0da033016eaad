"""Floating-point formats, and results that are rounded once, in any direction.

A result is first computed in float64 and rounded to odd. This keeps enough information for a correct second rounding to
a format of at most 24 bits of significand, in every direction, subnormals included (Boldo and Melquiond, "Emulation of
FMA and correctly rounded sums", 2008). float64 results are rounded from exact rational numbers. ml_dtypes would round
float64 twice, through float32, and only to nearest.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from greenfast.emulator.machine.blocks import Values

Wide = NDArray[np.float64]


@dataclass(frozen=True)
class Format:
    """A binary format: bits of significand (the hidden one too), exponent of the smallest subnormal, largest number."""

    precision: int
    lowest: int
    largest: float

    @property
    def smallest_normal(self) -> float:
        """The smallest number that is not subnormal."""
        return 2.0 ** (self.lowest + self.precision - 1)


FORMATS: dict[str, Format] = {
    "f16": Format(11, -24, 65504.0),
    "bf16": Format(8, -133, (2 - 2.0**-7) * 2.0**127),
    "tf32": Format(11, -136, (2 - 2.0**-10) * 2.0**127),
    "f32": Format(24, -149, (2 - 2.0**-23) * 2.0**127),
    "f64": Format(53, -1074, (2 - 2.0**-52) * 2.0**1023),
}

#: The bits of the NaN that an instruction makes. The PTX ISA calls it canonical; Hopper's is all ones but the sign,
#: and TF32's has zeros, too, where the format has no bits (H100, 2026-11-21).
NAN_BITS = {"f16": 0x7FFF, "bf16": 0x7FFF, "f32": 0x7FFF_FFFF, "tf32": 0x7FFF_E000, "f64": 0x7FF8_0000_0000_0000}
_NAN: dict[str, Values] = {
    "f16": np.array(NAN_BITS["f16"], np.uint16).view(np.float16),
    "f32": np.array(NAN_BITS["f32"], np.uint32).view(np.float32),
    "tf32": np.array(NAN_BITS["tf32"], np.uint32).view(np.float32),
    "f64": np.array(NAN_BITS["f64"], np.uint64).view(np.float64),
}


def _ties_away(x: Wide) -> Wide:
    size = np.abs(x)
    below = np.floor(size)
    return np.asarray(np.copysign(below + (size - below >= 0.5), x))


_WHOLE: dict[str, Callable[[Wide], Wide]] = {
    "rn": np.rint, "rna": _ties_away, "rz": np.trunc, "rm": np.floor, "rp": np.ceil,
}  # fmt: skip
#: PTX rounding modifiers.
MODES = tuple(_WHOLE)


def round_to(x: Values, form: Format, mode: str) -> Wide:
    """Round float64 numbers to a format of at most 24 bits of significand. Return them as float64."""
    x = np.asarray(x, np.float64)
    quantum = np.maximum(np.frexp(x)[1] - form.precision, form.lowest)
    result = np.ldexp(_WHOLE[mode](np.ldexp(x, -quantum)), quantum)
    beyond = (np.abs(result) > form.largest) & np.isfinite(x)
    if np.count_nonzero(beyond):
        stays: Any = {"rz": True, "rm": x > 0, "rp": x < 0}.get(mode, False)
        result = np.where(beyond, np.copysign(np.where(stays, form.largest, np.inf), x), result)
    return np.asarray(result)


def bf16_values(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    """Convert bit patterns of bfloat16 to numbers; NaN keeps its sign and payload."""
    return np.asarray(bits.view(ml_dtypes.bfloat16), np.float32)


def widen(values: Values, kind: str) -> Wide:
    """Convert stored values of a kind (see operands.TYPES) to float64."""
    if kind == "bf16":
        values = bf16_values(np.asarray(values))
    return np.asarray(values).astype(np.float64)


def narrow(x: Values, kind: str, mode: str = "rn") -> Values:
    """Store numbers of at most 24 significant bits, or rounded to odd, as a kind; NaN is canonical."""
    x = np.asarray(x)
    if kind == "f64":
        return canonical(x.astype(np.float64), kind)
    if kind in ("f16", "f32") and mode == "rn":
        return canonical(x.astype(np.float16 if kind == "f16" else np.float32), kind)
    rounded = round_to(x, FORMATS[kind], mode)
    if kind == "f16":
        return canonical(rounded.astype(np.float16), kind)
    single = canonical(rounded.astype(np.float32), "tf32" if kind == "tf32" else "f32")
    if kind == "bf16":
        return np.asarray(single.view(np.uint32) >> np.uint32(16)).astype(np.uint16)
    return single


def canonical(values: Values, kind: str) -> Values:
    """Replace every NaN by the kind's canonical NaN."""
    values = np.asarray(values)
    bad: Values = np.isnan(values)
    return np.where(bad, np.asarray(_NAN[kind]), values) if np.count_nonzero(bad) else values


def flush(x: Values, kind: str) -> Values:
    """Replace subnormal numbers of a kind by zeros with their sign (.ftz)."""
    x = np.asarray(x)
    tiny = np.abs(x) < x.dtype.type(FORMATS[kind].smallest_normal)
    return np.where(tiny, np.copysign(x.dtype.type(0), x), x) if np.count_nonzero(tiny) else x


def flush_rounded(rounded: Values, kind: str, mode: str, exact: Callable[[NDArray[np.bool_]], Wide]) -> Values:
    """Flush rounded numbers of a kind as .ftz does.

    exact: returns the numbers of a mask before rounding, or rounded to odd.

    The PTX ISA only defines that subnormal results are flushed. The hardware decides after rounding to the kind's
    significand with an unbounded exponent: 2^-126 (1 - 2^-24) becomes 0 in every mode, 2^-126 (1 - 2^-125) to nearest
    does not (mul, fma and div on H100, 2026-11-21).
    """
    rounded, form = np.asarray(rounded), FORMATS[kind]
    # Only a result rounded up to the smallest normal number can hide a subnormal one.
    doubtful = np.abs(rounded) == form.smallest_normal
    flushed = flush(rounded, kind)
    if not np.count_nonzero(doubtful):
        return flushed
    unbounded = Format(form.precision, -1000, form.largest)
    tiny = doubtful.copy()
    tiny[doubtful] = np.abs(round_to(exact(doubtful), unbounded, mode)) < form.smallest_normal
    return np.where(tiny, np.copysign(rounded.dtype.type(0), rounded), flushed)


# ---- one operation on float64 numbers that hold narrower ones, rounded to odd ---------------------------------------


def _bits(x: Wide) -> NDArray[np.int64]:
    return np.ascontiguousarray(x).view(np.int64).reshape(np.shape(x))


def _number(bits: Any) -> Wide:
    return np.ascontiguousarray(bits).view(np.float64).reshape(np.shape(bits))


def sum_to_odd(a: Wide, b: Wide, mode: str = "rn") -> Wide:
    """Compute a + b, and the sign that a zero gets in a rounding mode."""
    total = np.asarray(a + b)
    part = total - a
    error = (a - (total - part)) + (b - part)  # exact (Knuth's TwoSum)
    inexact = (error != 0) & np.isfinite(total)
    bits = _bits(total)
    away = np.where((error > 0) == (total > 0), 1, -1)
    odd = _number(np.where(inexact & ((bits & 1) == 0), bits + away, bits))
    if mode == "rm":  # an exact zero of unlike terms is negative only then
        odd = np.where((odd == 0) & (np.signbit(a) | np.signbit(b)), -0.0, odd)
    return odd


def _with_rest(result: Wide, kept_bits: int, remainder: Callable[[Wide], Wide], away: Callable[[Wide], Any]) -> Wide:
    """Set the last bit of a truncated quotient or root if the remainder is not zero. The remainder must be exact."""
    cut = _number(_bits(result) & ~((1 << (53 - kept_bits)) - 1))
    left = remainder(cut)
    sticky = np.isfinite(result) & np.isfinite(left) & (left != 0)
    return _number(np.where(sticky, _bits(cut) + np.where(away(left), 1, -1), _bits(result)))


def quotient_to_odd(a: Wide, b: Wide) -> Wide:
    """Compute a / b of numbers of at most 24 bits."""
    result = np.asarray(a / b)
    return _with_rest(
        result, 27, lambda q: a - q * b, lambda left: (np.signbit(left) ^ np.signbit(b)) == np.signbit(result)
    )


def root_to_odd(a: Wide) -> Wide:
    """Return the square root of a number of at most 24 bits."""
    return _with_rest(np.asarray(np.sqrt(a)), 26, lambda s: a - s * s, lambda left: left > 0)


def integer_to_odd(values: Values) -> Wide:
    """Convert integers of up to 64 bits to float64: exact up to 2^53, else truncated, the last bit set if inexact."""
    values = np.asarray(values)
    size = np.where(values < 0, np.uint64(0) - values.astype(np.uint64), values.astype(np.uint64))
    cut = size & ~np.uint64(2047)
    rough = _number(_bits(cut.astype(np.float64)) | ((size != cut) & (size >= 2**53)))
    result = np.where(size < 2**53, size.astype(np.float64), rough)
    return np.asarray(np.where(values < 0, -result, result))


# ---- float64 results, from exact rational numbers -------------------------------------------------------------------


def round_to_double(exact: Fraction | int, mode: str) -> float:
    """Round a rational number to float64; 0 becomes +0."""
    try:
        near = exact.numerator / exact.denominator  # Python rounds this to the nearest, ties to even
    except OverflowError:
        near = math.inf if exact > 0 else -math.inf
    if mode == "rn" or (not math.isinf(near) and Fraction(near) == exact):
        return near
    down = mode == "rm" or (mode == "rz" and exact > 0)
    if math.isinf(near):
        return near if (near < 0) == down else math.copysign(FORMATS["f64"].largest, near)
    if Fraction(near) > exact:
        return math.nextafter(near, -math.inf) if down else near
    return near if down else math.nextafter(near, math.inf)


def doubles(special: Callable[..., Wide], exact: Callable[..., Fraction], mode: str) -> Callable[..., Wide]:
    """Build a float64 function: ``exact`` rounded in a mode for finite non-zero numbers, else ``special``."""

    def run(*sources: Wide) -> Wide:
        arrays = np.broadcast_arrays(*sources)
        result = np.array(special(*arrays), np.float64)
        flat, columns = result.reshape(-1), [a.reshape(-1) for a in arrays]
        for n in range(flat.size):
            operands = [float(c[n]) for c in columns]
            if all(map(math.isfinite, operands)) and not math.isnan(flat[n]):
                try:
                    value = exact(*map(Fraction, operands))
                except ZeroDivisionError:
                    continue
                if value != 0:
                    flat[n] = round_to_double(value, mode)
        return result

    return run

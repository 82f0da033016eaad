"""Floating point from its definition: bit patterns to rational numbers and back, with Python's integers alone."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import cache, lru_cache

#: Exponent bits, fraction bits, canonical NaN. tf32 is kept in float32's pattern, with the last 13 bits zero.
FORMATS = {
    "f16": (5, 10, 0x7FFF),
    "bf16": (8, 7, 0x7FFF),
    "tf32": (8, 10, 0x3FFFF),
    "f32": (8, 23, 0x7FFF_FFFF),
    "f64": (11, 52, 0x7FF8_0000_0000_0000),
    "e5m2": (5, 2, 0x7F),
    "e4m3": (4, 3, 0x7F),
}


@dataclass(frozen=True)
class Number:
    """The value of a pattern. kind: nan, inf or real; negative: its sign, also for zero."""

    kind: str
    negative: bool
    value: Fraction = Fraction(0)


NAN = Number("nan", False)


def real(value: Fraction, negative_zero: bool = False) -> Number:
    """Return a rational number as a Number; zero has the sign that is given."""
    return Number("real", value.numerator < 0 or (value.numerator == 0 and negative_zero), value)


def infinity(negative: bool) -> Number:
    return Number("inf", negative)


@cache
def power(exponent: int) -> Fraction:
    """Return a power of two."""
    return Fraction(2) ** exponent


@lru_cache(maxsize=1 << 16)
def decode(bits: int, form: str) -> Number:
    """Decode a pattern."""
    exponent_bits, fraction, _ = FORMATS[form]
    negative = bool(bits >> (exponent_bits + fraction) & 1)
    exponent, low = bits >> fraction & (1 << exponent_bits) - 1, bits & (1 << fraction) - 1
    if form == "e4m3":
        if exponent == 15 and low == 7:
            return NAN
    elif exponent == (1 << exponent_bits) - 1:
        return NAN if low else infinity(negative)
    significand = low + (1 << fraction if exponent else 0)
    scale = max(exponent, 1) - (1 << exponent_bits - 1) + 1 - fraction
    value = significand * power(scale)
    return real(-value if negative else value, negative)


def smallest_normal(form: str) -> Fraction:
    """Return the smallest number that is not subnormal."""
    return power(2 - (1 << FORMATS[form][0] - 1))


def largest_pattern(form: str) -> int:
    """Return the pattern of the largest number."""
    exponent_bits, fraction, _ = FORMATS[form]
    return 0x7E if form == "e4m3" else (((1 << exponent_bits) - 1) << fraction) - 1


def round_magnitude(size: int, unit: int, negative: bool, mode: str) -> int:
    """Round the magnitude size / unit of a number to an integer."""
    whole, rest = divmod(size, unit)
    if mode in ("rn", "rni"):
        return whole + (2 * rest > unit or (2 * rest == unit and whole % 2 == 1))
    if mode == "rna":
        return whole + (2 * rest >= unit)
    return whole + (rest > 0 and {"z": False, "m": negative, "p": not negative}[mode[1]])


def encode(number: Number, form: str, mode: str = "rn", saturate: bool = False) -> int:
    """Return the pattern that a number rounds to; ``saturate``: to the largest number instead of infinity."""
    exponent_bits, fraction, nan = FORMATS[form]
    if number.kind == "nan":
        return nan
    sign = int(number.negative) << (exponent_bits + fraction)
    largest = largest_pattern(form)
    if number.kind == "inf":
        return sign | (largest if saturate else largest + 1)
    size, unit = abs(number.value.numerator), number.value.denominator  # as integers: fractions take four times as long
    if size == 0:
        return sign
    smallest = 2 - (1 << exponent_bits - 1)
    exponent = size.bit_length() - unit.bit_length()
    if size << max(0, -exponent) < unit << max(0, exponent):
        exponent -= 1
    exponent = max(exponent, smallest)
    size, unit = size << max(0, fraction - exponent), unit << max(0, exponent - fraction)
    whole = round_magnitude(size, unit, number.negative, mode)
    pattern = whole + (exponent - smallest << fraction)
    if pattern > largest:
        stays = saturate or mode == "rz" or (mode == "rm" and not number.negative) or (mode == "rp" and number.negative)
        pattern = largest if stays else largest + 1
    return sign | pattern


def flush(number: Number, form: str) -> Number:
    """Flush a subnormal number to zero, with its sign."""
    return real(Fraction(0), number.negative) if is_subnormal(number, form) else number


def is_subnormal(number: Number, form: str) -> bool:
    """Return whether a number other than zero is smaller than the smallest normal one."""
    size = abs(number.value.numerator)
    return size > 0 and size << (1 << FORMATS[form][0] - 1) - 2 < number.value.denominator


def flush_rounded(number: Number, form: str, mode: str) -> Number:
    """Flush a result to zero (.ftz) if it is subnormal after rounding to all bits of the significand.

    The ISA only defines that subnormal results are flushed; an H100 decides after rounding (2026-11-21).
    """
    smallest = smallest_normal(form)
    if is_subnormal(number, form):
        up = power(1 << FORMATS[form][0] - 2)  # to where exponents have no bound that matters
        if abs(decode(encode(real(number.value * up), form, mode), form).value) < smallest * up:
            return real(Fraction(0), number.negative)
    return number


# ---- operations, exact ----------------------------------------------------------------------------------------------


def negated(a: Number) -> Number:
    return a if a.kind == "nan" else Number(a.kind, not a.negative, -a.value)


def add(a: Number, b: Number, mode: str = "rn") -> Number:
    """Return the sum; an exact zero of unlike terms is negative only when rounding down."""
    if "nan" in (a.kind, b.kind) or (a.kind == b.kind == "inf" and a.negative != b.negative):
        return NAN
    if "inf" in (a.kind, b.kind):
        return a if a.kind == "inf" else b
    total = a.value + b.value
    if not total.numerator:
        return real(total, a.negative and b.negative if a.negative == b.negative else mode == "rm")
    return real(total)


def multiply(a: Number, b: Number) -> Number:
    """Return the product."""
    negative = a.negative != b.negative
    if "nan" in (a.kind, b.kind):
        return NAN
    if "inf" in (a.kind, b.kind):
        other = b if a.kind == "inf" else a
        return NAN if other.kind == "real" and other.value == 0 else infinity(negative)
    return real(a.value * b.value, negative)


def divide(a: Number, b: Number) -> Number:
    """Return the quotient."""
    negative = a.negative != b.negative
    if "nan" in (a.kind, b.kind) or a.kind == b.kind == "inf":
        return NAN
    if a.kind == "inf":
        return infinity(negative)
    if b.kind == "inf":
        return real(Fraction(0), negative)
    if b.value == 0:
        return NAN if a.value == 0 else infinity(negative)
    return real(a.value / b.value, negative)


def root(a: Number) -> Number:
    """Return the square root; an irrational one as a close number that rounds equally in every mode."""
    if a.kind == "nan" or (a.negative and not (a.kind == "real" and a.value == 0)):
        return NAN
    if a.kind == "inf" or a.value == 0:
        return a
    shift = 4**700
    scaled = a.value * shift
    whole = math.isqrt(math.floor(scaled))
    inexact = Fraction(whole) * whole != scaled
    return real((whole + (Fraction(1, 2) if inexact else 0)) / Fraction(2**700))


def clamp(number: Number) -> Number:
    """.sat: to [0, 1], NaN to +0."""
    if number.kind == "nan" or number.negative:
        return real(Fraction(0))
    return real(Fraction(1)) if number.kind == "inf" or number.value > 1 else number


def rectified(number: Number) -> Number:
    """.relu: negative numbers to +0."""
    return real(Fraction(0)) if number.kind != "nan" and number.negative else number


def on_halves(function: Callable[..., int]) -> Callable[..., int]:
    """Build a function of 16-bit patterns, for each half of 32-bit ones."""

    def both(*operands: int) -> int:
        return function(*(o & 0xFFFF for o in operands)) | function(*(o >> 16 for o in operands)) << 16

    return both

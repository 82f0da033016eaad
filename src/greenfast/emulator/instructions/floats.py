"""Floating-point arithmetic: add, sub, mul, fma, div, sqrt, rcp, min, max, neg, abs, copysign, testp, and functions.

PTX ISA, "Floating Point", "Half Precision Floating Point Instructions".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from greenfast.emulator.instructions.operands import Function, elementwise, parse_dtype, parse_type
from greenfast.emulator.instructions.rounding import (
    FORMATS,
    MODES,
    NAN_BITS,
    canonical,
    doubles,
    flush,
    flush_rounded,
    narrow,
    quotient_to_odd,
    root_to_odd,
    sum_to_odd,
    widen,
)
from greenfast.emulator.machine.blocks import Values
from greenfast.emulator.machine.state import Operation
from greenfast.emulator.ptx.syntax import Instruction

KINDS = ("f16", "bf16", "f16x2", "bf16x2", "f32", "f64")


def is_float(i: Instruction) -> bool:
    """Return whether the type of an instruction is a floating-point type."""
    return parse_type(i) in KINDS


def parse_element(kind: str) -> str:
    """Return the type of one number of a type that may be packed."""
    return kind.removesuffix("x2")


def packed(function: Function, kind: str) -> Function:
    """Build a function of 16-bit numbers on registers that hold two of them."""
    half = parse_dtype(parse_element(kind))

    def run(*sources: Values) -> Values:
        pairs = halves(sources, half)
        result = np.ascontiguousarray(np.asarray(function(*pairs), half))
        return result.view(np.uint32).reshape(pairs[0].shape[:-1])

    return run


def halves(sources: Sequence[Values], half: Any) -> list[Values]:
    """Registers that hold two numbers of a type each, all in one shape, with these two along a last axis."""
    shape = np.broadcast_shapes(*[s.shape for s in sources])
    whole = [s if s.shape == shape else np.broadcast_to(s, shape) for s in sources]
    return [np.ascontiguousarray(s).view(half).reshape(*shape, 2) for s in whole]


def per_number(i: Instruction, function: Function) -> Operation:
    """Build an operation that applies a function of the numbers' type to each number of the registers."""
    kind = parse_type(i)
    return elementwise(i, packed(function, kind) if kind.endswith("x2") else function)


def rounding(i: Instruction) -> str:
    """Return the rounding mode of an instruction; to nearest by default."""
    return next((p for p in i.parts if p in MODES), "rn")


def _finished(i: Instruction, kind: str, function: Function, exact: Function | None = None) -> Function:
    """Return the function with .ftz, .sat and .relu applied as the instruction has them, and canonical NaN.

    exact: the function before its result is rounded, or rounded to odd; float64.
    """
    ftz, saturates, clamps = ("ftz" in i.parts, "sat" in i.parts, "relu" in i.parts)
    mode = rounding(i)

    def run(*sources: Values) -> Values:
        if ftz:
            sources = tuple(flush(s, kind) for s in sources)
        result = np.asarray(function(*sources))
        if ftz and exact is not None:

            def unrounded(mask: Values) -> Values:
                return np.asarray(exact(*(a[mask] for a in np.broadcast_arrays(*sources))))

            result = flush_rounded(result, kind, mode, unrounded)
        elif ftz:
            result = flush(result, kind)
        if saturates:  # NaN becomes +0, and so does -0
            result = np.where(result > 0, np.minimum(result, result.dtype.type(1)), result.dtype.type(0))
        if clamps and kind == "bf16":
            result = np.where((result & 0x8000).astype(bool) & ((result & 0x7FFF) <= 0x7F80), np.uint16(0), result)
        elif clamps:
            result = np.where(result > 0, result, np.where(np.isnan(result), result, result.dtype.type(0)))
        return result if kind == "bf16" else canonical(result, kind)

    return run


def arithmetic(
    usual: Function, odd: Callable[..., Values], exact: Callable[..., Fraction]
) -> Callable[[Instruction], Operation]:
    """Build an instruction that rounds its result once.

    usual: NumPy's operation, right to the nearest on float32 and float64. odd: on float64 that hold narrower numbers,
    and the mode; rounded to odd. exact: on rational numbers.
    """

    def build(i: Instruction) -> Operation:
        kind, mode = parse_element(parse_type(i)), rounding(i)
        wide: Function = lambda *sources: odd(mode, *(widen(s, kind) for s in sources))  # noqa: E731
        if mode == "rn" and (kind == "f32" or (kind == "f64" and usual is not fused)):
            function = usual
        elif kind == "f64":
            function = doubles(lambda *sources: odd(mode, *sources), exact, mode)
        else:
            function = lambda *sources: narrow(wide(*sources), kind, mode)  # noqa: E731
        return per_number(i, _finished(i, kind, function, wide))

    return build


# For float64 values: the bits below float32's precision, half a step of float32, and float32's smallest normal number.
# NumPy is faster with arrays than with Python numbers.
_BELOW_FLOAT32, _HALF_A_STEP = np.asarray(0x1FFF_FFFF), np.asarray(0x1000_0000)
_SMALLEST_NORMAL = np.asarray(2.0**-126)


def fused(a: Values, b: Values, c: Values) -> Values:
    """Compute a * b + c of float32 numbers with one rounding, to the nearest."""
    # The product of two float32 is exact in float64. Rounding the sum to float64 first changes the result only if the
    # sum is halfway between two float32, or below the normal numbers.
    product = np.multiply(a, b, dtype=np.float64)
    total = np.asarray(np.add(product, c, dtype=np.float64))
    halfway, tiny = total.view(np.int64) & _BELOW_FLOAT32 == _HALF_A_STEP, np.abs(total) < _SMALLEST_NORMAL
    if np.count_nonzero(halfway) or np.count_nonzero(tiny):
        doubtful = halfway | (tiny & (total != 0))
        if np.count_nonzero(doubtful):
            product, addend = np.broadcast_arrays(product, np.asarray(c, np.float64))
            total[doubtful] = sum_to_odd(product[doubtful], addend[doubtful])
    return np.asarray(total.astype(np.float32))


def _fused(mode: str, a: Any, b: Any, c: Any) -> Any:
    product = np.asarray(a * b)  # exact for numbers of 24 bits
    beyond: Any = np.isinf(product)
    if beyond.any():  # only a product of float64 overflows; with an infinite addend it must not count as infinite
        product = np.where(
            beyond & np.isfinite(a) & np.isfinite(b), np.copysign(FORMATS["f64"].largest, product), product
        )
    return sum_to_odd(product, c, mode)


def _root(a: Fraction) -> Fraction:
    """Return a square root: exact if rational, else with an error below any float64 step."""
    scale = 1 << 1200
    n, d = math.isqrt(a.numerator * a.denominator * scale * scale), a.denominator * scale
    return Fraction(n * 2 + (n * n != a.numerator * a.denominator * scale * scale), d * 2) if a > 0 else Fraction(0)


add = arithmetic(lambda a, b: a + b, lambda mode, a, b: sum_to_odd(a, b, mode), lambda a, b: a + b)
subtract = arithmetic(lambda a, b: a - b, lambda mode, a, b: sum_to_odd(a, -b, mode), lambda a, b: a - b)
multiply = arithmetic(lambda a, b: a * b, lambda mode, a, b: a * b, lambda a, b: a * b)
multiply_add = arithmetic(fused, _fused, lambda a, b, c: a * b + c)
_rounded_quotient = arithmetic(lambda a, b: a / b, lambda mode, a, b: quotient_to_odd(a, b), lambda a, b: a / b)
sqrt = arithmetic(np.sqrt, lambda mode, a: root_to_odd(a), _root)
_rounded_reciprocal = arithmetic(
    lambda a: a.dtype.type(1) / a, lambda mode, a: quotient_to_odd(np.ones_like(a), a), lambda a: 1 / a
)


def divide(i: Instruction) -> Operation:
    """Build div; .approx is a * (1 / b), where 1 / b of |b| > 2^126 is taken for zero."""
    if "approx" not in i.parts:
        return _rounded_quotient(i)

    def quotient(a: Values, b: Values) -> Values:
        return np.where(np.abs(b) > np.float32(2.0**126), a * (np.float32(0) * np.sign(b)), a / b)

    return elementwise(i, _finished(i, "f32", quotient))


def build_sum(kind: str, ftz: bool) -> Function:
    """Return the sum, to the nearest, of numbers of a type that may be packed, as atomic operations form it."""
    element = parse_element(kind)

    def run(a: Values, b: Values) -> Values:
        x, y = (widen(flush(np.asarray(v), element) if ftz else v, element) for v in (a, b))
        total = narrow(x + y if element == "f64" else sum_to_odd(x, y), element)
        return flush(total, element) if ftz else total

    return packed(run, kind) if kind.endswith("x2") else run


def _gross(function: Function) -> Callable[[Instruction], Operation]:
    """Build rcp and rsqrt .approx.ftz.f64: they map the upper 32 bits of a number to the upper 32 bits of the result.

    The lower bits are zero. The ISA leaves the 20 bits of fraction open; here they are rounded.
    """

    def run(a: Values) -> Values:
        upper = np.ascontiguousarray(a).view(np.uint64) & np.uint64(0xFFFF_FFFF_0000_0000)
        result = flush(np.asarray(function(flush(upper.view(np.float64), "f64"))), "f64")
        bits = np.ascontiguousarray(result).view(np.uint64)
        rounded = (bits + np.uint64(0x8000_0000)) & np.uint64(0xFFFF_FFFF_0000_0000)
        return canonical(np.where(np.isnan(result), result, rounded.view(np.float64)), "f64")

    def build(i: Instruction) -> Operation:
        return elementwise(i, run)

    return build


def reciprocal(i: Instruction) -> Operation:
    """Build rcp."""
    if "approx" in i.parts and parse_type(i) == "f64":
        return _gross(lambda a: 1.0 / a)(i)
    return _rounded_reciprocal(i)


def reciprocal_root(i: Instruction) -> Operation:
    """Build rsqrt."""
    if parse_type(i) == "f64" and "ftz" in i.parts:
        return _gross(lambda a: 1.0 / np.sqrt(a))(i)
    return approximate(lambda a: 1.0 / np.sqrt(a))(i)


def approximate(function: Callable[[Values], Values]) -> Callable[[Instruction], Operation]:
    """Build a special function, computed in float64 and rounded once. Hardware differs within the ISA's bounds."""

    def build(i: Instruction) -> Operation:
        kind = parse_element(parse_type(i))
        ftz = "ftz" in i.parts

        def run(a: Values) -> Values:
            x = widen(a, kind)
            if not ftz:
                return narrow(function(x), kind)
            return narrow(flush(widen(narrow(function(flush(x, kind)), kind), kind), kind), kind)

        return per_number(i, run)

    return build


# ---- bits: instructions that pick or change a sign ------------------------------------------------------------------


def _unsigned(kind: str) -> Any:
    return np.dtype(f"u{parse_dtype(kind).itemsize}")


def _bit_function(i: Instruction, function: Callable[..., Values]) -> Operation:
    """Build an operation on the bit patterns of numbers, with .ftz applied to the sources."""
    kind = parse_element(parse_type(i))
    bits, ftz = _unsigned(kind), "ftz" in i.parts

    def run(*sources: Values) -> Values:
        if ftz:
            sources = tuple(flush(s, kind) for s in sources)
        arrays = [np.asarray(s).view(bits) for s in np.broadcast_arrays(*sources)]
        return np.asarray(function(*arrays)).astype(bits, copy=False).view(parse_dtype(kind))

    return per_number(i, run)


def _layout(kind: str) -> tuple[Any, Any]:
    """Return the sign bit of a kind's bit pattern, and the pattern of infinity."""
    unsigned, form = _unsigned(kind).type, FORMATS[kind]
    sign = unsigned(1 << (8 * parse_dtype(kind).itemsize - 1))
    return sign, sign - unsigned(1 << (form.precision - 1))


def extreme(smaller: bool) -> Callable[[Instruction], Operation]:
    """Build min and max: of a number and NaN the number, with .NaN NaN; -0 is less than +0.

    .xorsign.abs: of the magnitudes, with the product's sign.
    """

    def build(i: Instruction) -> Operation:
        kind = parse_element(parse_type(i))
        sign, infinity = _layout(kind)
        nan, any_nan = _unsigned(kind).type(NAN_BITS[kind]), "NaN" in i.parts

        def of_sizes(a: Values, b: Values) -> Values:
            result = run(a & ~sign, b & ~sign)
            return np.where(result > infinity, result, result | ((a ^ b) & sign))

        def run(a: Values, b: Values) -> Values:
            # Bit patterns in the order of their numbers.
            order_a, order_b = (np.where(x & sign, ~x, x | sign) for x in (a, b))
            bad_a, bad_b = ((x & ~sign) > infinity for x in (a, b))
            first = (order_a < order_b) == smaller
            result = np.where(bad_b | (first & ~bad_a), a, b)
            return np.where((bad_a | bad_b) if any_nan else (bad_a & bad_b), nan, result)

        if kind not in ("f32", "f64") or not {"NaN", "ftz", "abs"}.isdisjoint(i.parts):
            return _bit_function(i, of_sizes if "xorsign" in i.parts else run)
        usual, bits, dtype = np.fmin if smaller else np.fmax, _unsigned(kind), parse_dtype(kind)

        def numbers(a: Values, b: Values) -> Values:
            """Use NumPy's function unless signs of zero or NaN decide: it takes a quarter of the time."""
            result: Values = np.asarray(usual(a, b))
            if np.count_nonzero(result) == result.size and not np.count_nonzero(result != result):
                return result
            return np.asarray(run(*(np.asarray(x).view(bits) for x in np.broadcast_arrays(a, b)))).view(dtype)

        return per_number(i, numbers)

    return build


def _signed(function: Callable[[Values, Any], Values]) -> Callable[[Instruction], Operation]:
    """Build neg and abs.

    The ISA leaves their NaN open: ptxas uses additions, and narrow types produce canonical NaN.
    """

    def build(i: Instruction) -> Operation:
        kind = parse_element(parse_type(i))
        sign, infinity = _layout(kind)
        nan = _unsigned(kind).type(NAN_BITS[kind])

        def run(a: Values) -> Values:
            result = function(a, sign)
            return result if kind == "f64" else np.where((a & ~sign) > infinity, nan, result)

        return _bit_function(i, run)

    return build


negate = _signed(lambda a, sign: a ^ sign)
absolute = _signed(lambda a, sign: a & ~sign)


def copysign(i: Instruction) -> Operation:
    """Build copysign: the sign of a on b."""
    sign, _ = _layout(parse_type(i))
    return _bit_function(i, lambda a, b: (a & sign) | (b & ~sign))


def testp(i: Instruction) -> Operation:
    """Build testp: whether a number is of a class; zeros count as normal."""
    kind = parse_type(i)
    tiny = FORMATS[kind].smallest_normal
    classes: dict[str, Function] = {
        "finite": np.isfinite,
        "infinite": np.isinf,
        "number": lambda a: ~np.isnan(a),
        "notanumber": np.isnan,
        "normal": lambda a: np.isfinite(a) & ((a == 0) | (np.abs(a) >= a.dtype.type(tiny))),
        "subnormal": lambda a: (a != 0) & (np.abs(a) < a.dtype.type(tiny)),
    }
    return elementwise(i, lambda a: classes[i.parts[0]](np.asarray(a)), out="pred")


#: Instructions that exist for floats only.
BUILDERS: dict[str, Callable[[Instruction], Operation]] = {
    "fma": multiply_add,
    "sqrt": sqrt,
    "rcp": reciprocal,
    "copysign": copysign,
    "testp": testp,
    "ex2": approximate(np.exp2),
    "lg2": approximate(np.log2),
    "rsqrt": reciprocal_root,
    "sin": approximate(np.sin),
    "cos": approximate(np.cos),
    "tanh": approximate(np.tanh),
}

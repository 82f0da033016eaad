"""Integer arithmetic, and the choice between it and floats where an opcode has both (PTX ISA, "Instruction Set")."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from greenfast.emulator.instructions import floats
from greenfast.emulator.instructions.operands import Function, elementwise, parse_dtype, parse_type, reader, writer
from greenfast.emulator.machine.blocks import ThreadSet, Values
from greenfast.emulator.machine.state import Operation, ResidentBlocks
from greenfast.emulator.ptx.syntax import Instruction

#: The type of a product by .wide.
WIDE = {"s16": "s32", "u16": "u32", "s32": "s64", "u32": "u64"}


def _pairs(function: Function, kind: str) -> Function:
    """Build a function of 16-bit integers on registers that hold two of them; any other type's function as it is."""
    return floats.packed(function, kind) if kind.endswith("x2") else function


def add_like(function: Function, of_floats: Callable[[Instruction], Operation]) -> Callable[[Instruction], Operation]:
    """Build add and sub: integers wrap, .sat saturates s32."""

    def build(i: Instruction) -> Operation:
        if floats.is_float(i):
            return of_floats(i)
        if "cc" in i.parts:
            return carrying(i)
        kind = parse_type(i)
        if "sat" in i.parts:
            return elementwise(i, lambda a, b: _saturated(function(np.int64(a), np.int64(b))))
        return elementwise(i, _pairs(function, kind))

    return build


def _saturated(wide: Values) -> Values:
    return np.asarray(np.clip(wide, -(2**31), 2**31 - 1).astype(np.int32))


def high_product(a: Values, b: Values) -> Values:
    """Return the upper half of the product of two integers of a type."""
    a, b = np.broadcast_arrays(a, b)
    dtype, bits = a.dtype, 8 * a.dtype.itemsize
    if bits < 64:
        wide = np.int64 if dtype.kind == "i" else np.uint64
        return np.asarray((a.astype(wide) * b.astype(wide)) >> wide(bits)).astype(dtype)
    ua, ub, low, half = a.astype(np.uint64), b.astype(np.uint64), np.uint64(2**32 - 1), np.uint64(32)
    middle = (ua >> half) * (ub & low) + ((ua & low) * (ub & low) >> half)
    other = (ua & low) * (ub >> half) + (middle & low)
    high = (ua >> half) * (ub >> half) + (middle >> half) + (other >> half)
    if dtype.kind == "i":
        high = high - np.where(a < 0, ub, np.uint64(0)) - np.where(b < 0, ua, np.uint64(0))
    return np.asarray(high.astype(dtype))


def _product(i: Instruction) -> tuple[Function, str]:
    """Return the integer product for .lo, .hi or .wide, and the type of the result."""
    kind = parse_type(i)
    if "wide" in i.parts:
        wide = parse_dtype(WIDE[kind])
        return lambda a, b: np.asarray(a).astype(wide) * np.asarray(b).astype(wide), WIDE[kind]
    return high_product if "hi" in i.parts else lambda a, b: a * b, kind


def mul(i: Instruction) -> Operation:
    """Build mul."""
    if floats.is_float(i):
        return floats.multiply(i)
    function, out = _product(i)
    return elementwise(i, function, out=out)


def mad(i: Instruction) -> Operation:
    """Build mad."""
    if floats.is_float(i):
        return floats.multiply_add(i)
    if "cc" in i.parts:
        return carrying(i)
    kind = parse_type(i)
    function, out = _product(i)
    types = [kind, kind, out]
    if "sat" in i.parts:
        return elementwise(i, lambda a, b, c: _saturated(function(a, b).astype(np.int64) + c), types=types)
    return elementwise(i, lambda a, b, c: function(a, b) + c, types=types, out=out)


def product24(i: Instruction) -> Operation:
    """Build mul24 and mad24: of the low 24 bits of the factors bits 47..16 or 31..0 of the product."""
    dtype = parse_dtype(parse_type(i))
    wide = np.int64 if dtype.kind == "i" else np.uint64

    def function(a: Values, b: Values, c: Values | None = None) -> Values:
        low, high = ((np.asarray(x).astype(wide) << wide(40)) >> wide(40) for x in (a, b))
        product = low * high
        part = ((product >> wide(16)) if "hi" in i.parts else product).astype(dtype)
        if c is None:
            return np.asarray(part)
        return _saturated(part.astype(np.int64) + c) if "sat" in i.parts else np.asarray(part + c)

    return elementwise(i, function)


# ---- carry chains ---------------------------------------------------------------------------------------------------


def _carry(m: ResidentBlocks) -> Values:
    """Return the condition-code register CC.CF of all threads."""
    return m.registers.setdefault("CC.CF", np.zeros(m.lanes, np.bool_))


def carrying(i: Instruction) -> Operation:
    """Build add, sub and mad with carry in (addc, subc, madc) or carry out (.cc).

    The PTX ISA calls the carry of sub.cc a borrow. ptxas compiles it to a + ~b + 1, with the opposite carry, and subc
    to a + ~b + carry (SASS of CUDA 13.0: IADD3 and IADD3.X). The difference is visible in chains that mix additions and
    subtractions.
    """
    kind = parse_type(i)
    unsigned = parse_dtype(f"u{kind[1:]}")
    read, write = [reader(o, kind, i) for o in i.operands[1:]], writer(i.operands[0], kind, i)
    takes, gives, subtracts = i.name.endswith("c"), "cc" in i.parts, i.name.startswith("sub")
    product = _product(i)[0] if i.name.startswith("mad") else None

    def run(m: ResidentBlocks, lanes: ThreadSet) -> None:
        sources: list[Any] = [r(m, lanes) for r in read]
        if product is not None:
            sources = [product(*sources[:2]), sources[2]]
        a, b = (np.asarray(s).astype(unsigned) for s in sources)
        if subtracts:
            b = ~b
        carry = _carry(m)[lanes] if takes else np.bool_(subtracts)
        part = a + b
        result = part + carry.astype(unsigned)
        carry = (part < a) | (result < part)
        if gives:
            _carry(m)[lanes] = carry
        write(m, lanes, result.astype(parse_dtype(kind)))

    return run


# ---- division and sums ----------------------------------------------------------------------------------------------


def divide(i: Instruction) -> Operation:
    """Build div: integers truncate toward zero."""
    if floats.is_float(i):
        return floats.divide(i)
    signed = parse_dtype(parse_type(i)).kind == "i"

    def quotient(a: Values, b: Values) -> Values:
        result = np.asarray(a // b)
        return result + ((result < 0) & (result * b != a)) if signed else result

    return _by_no_zero(i, quotient)


def remainder(i: Instruction) -> Operation:
    """Build rem, of the sign of the dividend."""
    return _by_no_zero(i, np.fmod)


def _by_no_zero(i: Instruction, function: Callable[[Values, Values], Values]) -> Operation:
    """Build a division.

    The ISA leaves a divisor of 0 open: the result is all ones, and 0 in orders other than the first.
    """
    kind = parse_type(i)
    dtype = parse_dtype(kind)
    destination, *sources = i.operands
    first, second = (reader(source, kind, i) for source in sources)
    write = writer(destination, kind, i)

    def run(m: ResidentBlocks, lanes: ThreadSet) -> None:
        b = np.asarray(second(m, lanes))
        result = function(np.asarray(first(m, lanes)), np.where(b == 0, dtype.type(1), b))
        write(m, lanes, np.where(b == 0, dtype.type(0) if m.seed else ~dtype.type(0), result).astype(dtype))

    return run


def sum_of_differences(i: Instruction) -> Operation:
    """Build sad: c + |a - b|."""
    return elementwise(i, lambda a, b, c: c + np.where(a < b, b - a, a - b))


def dot_product(i: Instruction) -> Operation:
    """Build dp4a and dp2a: c plus the products of bytes with bytes, or of halves with the lower or upper two bytes."""
    kinds = [p for p in i.parts if p in ("u32", "s32")]
    signs = ["i" if k == "s32" else "u" for k in kinds]
    out = "s32" if "s32" in kinds else "u32"
    halves = i.name == "dp2a"
    used = slice(None) if not halves else slice(2, 4) if "hi" in i.parts else slice(0, 2)

    def function(a: Values, b: Values, c: Values) -> Values:
        shape = np.broadcast_shapes(np.shape(a), np.shape(b))
        a, b = (np.ascontiguousarray(np.broadcast_to(x, shape)) for x in (a, b))
        left = a.view(f"{signs[0]}{2 if halves else 1}").reshape(*shape, -1).astype(np.int64)
        right = b.view(f"{signs[1]}1").reshape(*shape, 4)[..., used].astype(np.int64)
        return np.asarray((left * right).sum(axis=-1) + np.asarray(c)).astype(np.int64).astype(parse_dtype(out))

    return elementwise(i, function, types=["b32", "b32", out], out=out)


def differences_of_bytes(i: Instruction) -> Operation:
    """Build vabsdiff4: |a - b| of four bytes, or with .add c plus their sum.

    Other video instructions are unknown: no compiler emits them, CUDA's __vadd4 and its kin included.
    """
    out, left, right = (p for p in i.parts if p in ("u32", "s32"))
    limits = np.iinfo(np.int8 if out == "s32" else np.uint8)
    sums, saturates = "add" in i.parts, "sat" in i.parts

    def function(a: Values, b: Values, c: Values) -> Values:
        a, b, c = (np.ascontiguousarray(x) for x in np.broadcast_arrays(a, b, c))
        bytes_of_a, bytes_of_b = (
            x.view(np.int8 if kind == "s32" else np.uint8).reshape(*x.shape, 4).astype(np.int64)
            for x, kind in ((a, left), (b, right))
        )
        result = np.abs(bytes_of_a - bytes_of_b)
        if saturates:
            result = np.clip(result, limits.min, limits.max)
        if sums:
            return np.asarray(result.sum(axis=-1) + c.astype(np.int64)).astype(np.uint32)
        return np.ascontiguousarray(result.astype(np.uint8)).view(np.uint32).reshape(a.shape)

    return elementwise(i, function, types=["b32", "b32", "b32"], out="b32")


# ---- one or two numbers ---------------------------------------------------------------------------------------------


def extreme(smaller: bool) -> Callable[[Instruction], Operation]:
    """Build min and max; .relu also clamps at 0."""

    def build(i: Instruction) -> Operation:
        if floats.is_float(i):
            return floats.extreme(smaller)(i)
        choose: Function = np.minimum if smaller else np.maximum
        function = (lambda a, b: np.maximum(choose(a, b), 0)) if "relu" in i.parts else choose
        return elementwise(i, _pairs(function, parse_type(i)))

    return build


def negate(i: Instruction) -> Operation:
    """Build neg."""
    return floats.negate(i) if floats.is_float(i) else elementwise(i, np.negative)


def absolute(i: Instruction) -> Operation:
    """Build abs."""
    return floats.absolute(i) if floats.is_float(i) else elementwise(i, np.abs)


BUILDERS: dict[str, Callable[[Instruction], Operation]] = {
    **floats.BUILDERS,
    "add": add_like(lambda a, b: a + b, floats.add),
    "sub": add_like(lambda a, b: a - b, floats.subtract),
    "addc": carrying,
    "subc": carrying,
    "mul": mul,
    "mad": mad,
    "madc": carrying,
    "mul24": product24,
    "mad24": product24,
    "div": divide,
    "rem": remainder,
    "sad": sum_of_differences,
    "dp4a": dot_product,
    "dp2a": dot_product,
    "vabsdiff4": differences_of_bytes,
    "min": extreme(True),
    "max": extreme(False),
    "neg": negate,
    "abs": absolute,
}

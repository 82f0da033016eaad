"""Instructions on bits: logic, shifts, bit fields, counts, byte permutation (PTX ISA, "Logic and Shift", "Integer")."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from greenfast.emulator.instructions.operands import Function, elementwise, parse_dtype, parse_type, reader, writer
from greenfast.emulator.machine.blocks import ThreadSet, Values
from greenfast.emulator.machine.state import Operation, ResidentBlocks
from greenfast.emulator.ptx.syntax import Instruction, Vector
from greenfast.emulator.ptx.unsupported import unsupported


def bitwise(function: Function) -> Callable[[Instruction], Operation]:
    """Build and, or, xor, not."""
    return lambda i: elementwise(i, function)


def logical_not(i: Instruction) -> Operation:
    """Build cnot: 1 for 0, else 0."""
    dtype = parse_dtype(parse_type(i))
    return elementwise(i, lambda a: np.asarray(a == 0).astype(dtype))


def shift(right: bool) -> Callable[[Instruction], Operation]:
    """Build shl and shr: amounts beyond the width shift everything out."""

    def build(i: Instruction) -> Operation:
        kind = parse_type(i)
        bits = 8 * parse_dtype(kind).itemsize
        signed = parse_dtype(kind).kind == "i"

        def function(a: Values, b: Values) -> Values:
            amount = np.minimum(b, bits - 1).astype(np.asarray(a).dtype)
            if right and signed:
                return np.asarray(a >> amount)
            shifted = a >> amount if right else a << amount
            return np.where(b >= bits, 0, shifted).astype(np.asarray(a).dtype)

        return elementwise(i, function, types=[kind, "u32"])

    return build


def funnel_shift(i: Instruction) -> Operation:
    """Build shf: shift {b, a} left and return the upper word, or shift it right and return the lower word."""
    left, clamps = "l" in i.parts, "clamp" in i.parts

    def function(a: Values, b: Values, c: Values) -> Values:
        both = np.asarray(a).astype(np.uint64) | (np.asarray(b).astype(np.uint64) << np.uint64(32))
        amount = (np.minimum(c, 32) if clamps else np.asarray(c) & 31).astype(np.uint64)
        shifted = both << amount >> np.uint64(32) if left else both >> amount
        return np.asarray(shifted).astype(np.uint32)

    return elementwise(i, function)


#: The four digits of prmt's special modes for the selectors 0 to 3, the lowest byte's digit first.
_PERMUTE_MODES = {
    "f4e": ("0123", "1234", "2345", "3456"),
    "b4e": ("0765", "1076", "2107", "3210"),
    "rc8": ("0000", "1111", "2222", "3333"),
    "ecl": ("0123", "1123", "2223", "3333"),
    "ecr": ("0000", "0111", "0122", "0123"),
    "rc16": ("0101", "2323", "0101", "2323"),
}


def permute_bytes(i: Instruction) -> Operation:
    """Build prmt: a selector digit picks a byte, its top bit replicates the byte's sign; a mode sets the digits."""
    mode = next((p for p in i.parts if p in _PERMUTE_MODES), None)
    table = None
    if mode is not None:
        table = np.array([int(digits[::-1], 16) for digits in _PERMUTE_MODES[mode]], np.uint64)

    def function(a: Values, b: Values, selector: Values) -> Values:
        both = np.asarray(a).astype(np.uint64) | (np.asarray(b).astype(np.uint64) << np.uint64(32))
        digits = np.asarray(selector).astype(np.uint64) if table is None else table[np.asarray(selector) & 3]
        result: Any = np.uint64(0)
        for n in range(4):
            digit = (digits >> np.uint64(4 * n)) & np.uint64(15)
            byte = (both >> ((digit & np.uint64(7)) * np.uint64(8))) & np.uint64(255)
            sign = np.where(byte & np.uint64(128), np.uint64(255), np.uint64(0))
            result = result | (np.where(digit & np.uint64(8), sign, byte) << np.uint64(8 * n))
        return np.asarray(result).astype(np.uint32)

    return elementwise(i, function)


def _low_bits(count: Values) -> Values:
    """Return 64-bit words with the lowest ``count`` (0 to 64) bits set."""
    full = ~np.uint64(0)
    return np.where(count >= 64, full, ~(full << np.minimum(count, 63).astype(np.uint64)))


def _amount(values: Values, bits: int) -> Values:
    """Return a position or length of bfi and bfe on registers of ``bits`` bits.

    The PTX ISA uses the low 8 bits of both. So does the hardware for 32 bits. For 64 bits, ptxas uses shifts, and all
    32 bits of the amount count (SASS; seen on H100, 2026-11-21: a length of 2^31 is a full one).
    """
    return np.asarray(values) & 255 if bits == 32 else np.minimum(values, bits)


def insert_bits(i: Instruction) -> Operation:
    """Build bfi: ``length`` bits of a into b at ``position``; bits beyond the width are dropped."""
    kind = parse_type(i)
    bits = 8 * parse_dtype(kind).itemsize

    def function(a: Values, b: Values, position: Values, length: Values) -> Values:
        p = np.minimum(_amount(position, bits), bits)
        p, outside = np.minimum(p, bits - 1).astype(np.uint64), p == bits
        mask = np.where(outside, np.uint64(0), _low_bits(_amount(length, bits)) << p)
        wide_a, wide_b = np.asarray(a).astype(np.uint64), np.asarray(b).astype(np.uint64)
        return np.asarray((wide_b & ~mask) | ((wide_a << p) & mask)).astype(parse_dtype(kind))

    return elementwise(i, function, types=[kind, kind, "u32", "u32"])


def extract_bits(i: Instruction) -> Operation:
    """Build bfe: ``length`` bits of a from ``position`` on, sign-extended if signed; beyond a they have a's sign."""
    kind = parse_type(i)
    dtype = parse_dtype(kind)
    bits = 8 * dtype.itemsize
    wide = np.int64 if dtype.kind == "i" else np.uint64

    def function(a: Values, position: Values, length: Values) -> Values:
        p, n = _amount(position, bits), _amount(length, bits)
        value = np.asarray(a).astype(wide) >> np.minimum(p, bits - 1).astype(wide)
        if dtype.kind == "u":
            value = np.where(p < bits, value, 0)
        unused = np.maximum(64 - n.astype(np.int64), 0).astype(wide)
        shifted = value << np.minimum(unused, 63).astype(wide) >> np.minimum(unused, 63).astype(wide)
        return np.where(n == 0, 0, shifted).astype(dtype)

    return elementwise(i, function, types=[kind, "u32", "u32"])


def count_bits(function: Function) -> Callable[[Instruction], Operation]:
    """Build popc and clz."""
    return lambda i: elementwise(i, function, out="u32")


def _leading_zeros(a: Values) -> Values:
    bits = 8 * np.asarray(a).dtype.itemsize
    wide = np.asarray(a).astype(np.uint64)
    result = np.full(wide.shape, bits, np.uint32)
    for n in range(bits):
        result = np.where((wide >> np.uint64(n)) & np.uint64(1) == 1, np.uint32(bits - 1 - n), result)
    return result.astype(np.uint32)


def find_bit(i: Instruction) -> Operation:
    """Build bfind: the position of the highest non-sign bit, or with .shiftamt its distance to the top."""
    dtype = parse_dtype(parse_type(i))
    bits = 8 * dtype.itemsize

    def function(a: Values) -> Values:
        a = np.asarray(a)
        zeros = _leading_zeros((a ^ (a >> dtype.type(bits - 1)) if dtype.kind == "i" else a).view(f"u{bits // 8}"))
        result = zeros if "shiftamt" in i.parts else np.uint32(bits - 1) - zeros
        return np.where(zeros == bits, ~np.uint32(0), result)

    return elementwise(i, function, out="u32")


def reverse_bits(i: Instruction) -> Operation:
    """Build brev."""
    bits = 8 * parse_dtype(parse_type(i)).itemsize

    def function(a: Values) -> Values:
        a = np.asarray(a)
        one = a.dtype.type(1)
        result = np.zeros_like(a)
        for n in range(bits):
            result |= ((a >> a.dtype.type(n)) & one) << a.dtype.type(bits - 1 - n)
        return result

    return elementwise(i, function)


def bit_mask(i: Instruction) -> Operation:
    """Build bmsk: b set bits from position a on."""
    clamps = "clamp" in i.parts

    def function(a: Values, b: Values) -> Values:
        start, count = (np.asarray(x) if clamps else np.asarray(x) & 31 for x in (a, b))
        mask = _low_bits(np.minimum(count, 32)) << np.minimum(start, 32).astype(np.uint64)
        return np.asarray(mask & np.uint64(2**32 - 1)).astype(np.uint32)

    return elementwise(i, function)


def extend(i: Instruction) -> Operation:
    """Build szext: the lowest b bits of a, extended by their sign or by zeros."""
    clamps, dtype = "clamp" in i.parts, parse_dtype(parse_type(i))

    def function(a: Values, b: Values) -> Values:
        count = np.minimum(b, 32) if clamps else np.asarray(b) & 31
        unused = np.minimum(32 - count.astype(np.int64), 31).astype(dtype)
        return np.where(count == 0, 0, (a << unused) >> unused).astype(dtype)

    return elementwise(i, function, types=[parse_type(i), "u32"])


def lop3(i: Instruction) -> Operation:
    """Build lop3: any function of three bits, by its truth table; .or and .and also combine a predicate."""

    def function(a: Values, b: Values, c: Values, lut: Values) -> Values:
        result: Any = np.uint32(0)
        for n in range(8):
            term = (a if n & 4 else ~a) & (b if n & 2 else ~b) & (c if n & 1 else ~c)
            result = result | np.where((int(lut) >> n) & 1, term, np.uint32(0))
        return np.asarray(result).astype(np.uint32)

    types = ["b32", "b32", "b32", "u32"]
    if "or" not in i.parts and "and" not in i.parts:
        return elementwise(i, function, types=types)
    targets = i.operands[0]
    if not isinstance(targets, Vector):
        raise unsupported(i)
    write, write_flag = writer(targets.items[0], "b32", i), writer(targets.items[1], "pred", i)
    read = [reader(o, kind, i) for o, kind in zip(i.operands[1:5], types, strict=True)]
    other, combine = reader(i.operands[5], "pred", i), np.logical_or if "or" in i.parts else np.logical_and

    def run(m: ResidentBlocks, lanes: ThreadSet) -> None:
        result = function(*(r(m, lanes) for r in read))
        flag = combine(result != 0, other(m, lanes))
        write(m, lanes, result)
        write_flag(m, lanes, flag)

    return run


def find_nth(i: Instruction) -> Operation:
    """Build fns: the position of the n-th set bit of a mask, from a position on, upwards or (n < 0) downwards."""

    def function(mask: Values, base: Values, offset: Values) -> Values:
        mask, base, offset = np.broadcast_arrays(mask, base, offset)
        position, left = base.astype(np.int64), np.maximum(np.abs(offset.astype(np.int64)), 1)
        step = np.sign(offset.astype(np.int64))
        result = np.full(mask.shape, ~np.uint32(0))
        for _ in range(32):
            inside = (position >= 0) & (position < 32)
            here = (mask >> np.where(inside, position, 0).astype(np.uint32) & np.uint32(1)).astype(np.bool_) & inside
            left = left - here
            result = np.where(here & (left == 0), position.astype(np.uint32), result)
            position = np.where(step == 0, -1, position + step)  # 0 looks at the position alone
        # GPU behaviour; the PTX ISA does not define the negative of such an offset.
        return np.where(offset.astype(np.int64) == -(2**31), 0, result).astype(np.uint32)

    return elementwise(i, function, types=["b32", "u32", "s32"], out="u32")


BUILDERS: dict[str, Callable[[Instruction], Operation]] = {
    "and": bitwise(lambda a, b: a & b),
    "or": bitwise(lambda a, b: a | b),
    "xor": bitwise(lambda a, b: a ^ b),
    "not": bitwise(lambda a: ~a),
    "cnot": logical_not,
    "shl": shift(False),
    "shr": shift(True),
    "shf": funnel_shift,
    "prmt": permute_bytes,
    "bfi": insert_bits,
    "bfe": extract_bits,
    "bfind": find_bit,
    "bmsk": bit_mask,
    "brev": reverse_bits,
    "szext": extend,
    "popc": count_bits(lambda a: np.bitwise_count(a).astype(np.uint32)),
    "clz": count_bits(_leading_zeros),
    "lop3": lop3,
    "fns": find_nth,
}

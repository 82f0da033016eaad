"""Instructions that rearrange and count bits (PTX ISA: prmt, bfi, bfe, popc, clz, lop3)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from greenfast.emulator.arithmetic import Function, elementwise
from greenfast.emulator.machine import Operation, Values
from greenfast.emulator.operands import dtype_of, type_of, unsupported
from greenfast.emulator.ptx import Instruction


def permute_bytes(i: Instruction) -> Operation:
    """prmt in its generic mode: each selector digit picks a byte, its top bit replicates that byte's sign."""
    if len(i.parts) > 1:
        raise unsupported(i)

    def function(a: Values, b: Values, selector: Values) -> Values:
        both = np.asarray(a).astype(np.uint64) | (np.asarray(b).astype(np.uint64) << np.uint64(32))
        result: Any = np.uint64(0)
        for n in range(4):
            digit = (np.asarray(selector).astype(np.uint64) >> np.uint64(4 * n)) & np.uint64(15)
            byte = (both >> ((digit & np.uint64(7)) * np.uint64(8))) & np.uint64(255)
            sign = np.where(byte & np.uint64(128), np.uint64(255), np.uint64(0))
            result = result | (np.where(digit & np.uint64(8), sign, byte) << np.uint64(8 * n))
        return np.asarray(result).astype(np.uint32)

    return elementwise(i, function)


def insert_bits(i: Instruction) -> Operation:
    """bfi: ``length`` bits of a into b at ``position``."""
    kind = type_of(i)
    dtype = dtype_of(kind)

    def function(a: Values, b: Values, position: Values, length: Values) -> Values:
        p, n = np.uint64(position) & np.uint64(255), np.uint64(length) & np.uint64(255)
        mask = ((np.uint64(1) << np.minimum(n, np.uint64(63))) - np.uint64(1)) << np.minimum(p, np.uint64(63))
        wide_a, wide_b = np.asarray(a).astype(np.uint64), np.asarray(b).astype(np.uint64)
        return np.asarray((wide_b & ~mask) | ((wide_a << p) & mask)).astype(dtype, copy=False)

    return elementwise(i, function, types=[kind, kind, "u32", "u32"])


def extract_bits(i: Instruction) -> Operation:
    """bfe: ``length`` bits of a from ``position`` on, sign-extended for signed types."""
    kind = type_of(i)
    dtype = dtype_of(kind)
    bits = 8 * dtype.itemsize

    def function(a: Values, position: Values, length: Values) -> Values:
        p = np.minimum(np.asarray(position) & 255, 63).astype(np.int64)
        n = np.minimum(np.asarray(length) & 255, bits).astype(np.int64)
        wide = np.asarray(a).astype(np.int64 if dtype.kind == "i" else np.uint64)
        shifted = wide >> p.astype(wide.dtype)
        mask = np.where(n >= 64, -1, (np.int64(1) << np.minimum(n, 62)) - 1)
        value = shifted.astype(np.int64) & mask
        if dtype.kind == "i":
            sign = (value >> np.maximum(n - 1, 0)) & 1
            value = np.where((n > 0) & (sign == 1), value | ~mask, value)
        return np.asarray(value).astype(dtype, copy=False)

    return elementwise(i, function, types=[kind, "u32", "u32"])


def count_bits(function: Function) -> Callable[[Instruction], Operation]:
    """popc, clz and brev."""
    return lambda i: elementwise(i, function, out="u32" if i.name != "brev" else type_of(i))


def _leading_zeros(a: Values) -> Values:
    bits = 8 * np.asarray(a).dtype.itemsize
    wide = np.asarray(a).astype(np.uint64)
    found = np.full(wide.shape, bits, np.uint32)
    for n in range(bits):
        found = np.where((wide >> np.uint64(n)) & np.uint64(1) == 1, np.uint32(bits - 1 - n), found)
    return found.astype(np.uint32)


def lop3(i: Instruction) -> Operation:
    """lop3: any function of three bits, by its truth table."""

    def function(a: Values, b: Values, c: Values, lut: Values) -> Values:
        result: Any = np.uint32(0)
        for n in range(8):
            term = (a if n & 4 else ~a) & (b if n & 2 else ~b) & (c if n & 1 else ~c)
            result = result | np.where((int(lut) >> n) & 1, term, np.uint32(0))
        return np.asarray(result).astype(np.uint32)

    return elementwise(i, function, types=["b32", "b32", "b32", "u32"])


BUILDERS: dict[str, Callable[[Instruction], Operation]] = {
    "prmt": permute_bytes,
    "bfi": insert_bits,
    "bfe": extract_bits,
    "popc": count_bits(lambda a: np.bitwise_count(a).astype(np.uint32)),
    "clz": count_bits(_leading_zeros),
    "lop3": lop3,
}

"""cvt: conversions between numbers, with the 8-bit formats (PTX ISA, "cvt")."""

from __future__ import annotations

from typing import Any

import numpy as np

from greenfast.emulator.machine import Lanes, Machine, Operation, Values
from greenfast.emulator.operands import TYPES, dtype_of, reader, unsupported, writer
from greenfast.emulator.ptx import Instruction

_E4M3_MAX, _E4M3_STEP, _E4M3_TINY = 448.0, 3, -6  # largest value, mantissa bits, smallest normal exponent


def _table_of_e4m3() -> Values:
    codes = np.arange(256)
    exponent, mantissa = codes >> 3 & 15, codes & 7
    value = np.where(
        exponent == 0, mantissa * 2.0 ** (_E4M3_TINY - 3), (8 + mantissa) * 2.0 ** (exponent.astype(float) - 10)
    )
    value = np.where(codes & 127 == 127, np.nan, value)
    return np.where(codes & 128, -value, value).astype(np.float32)


E4M3_VALUES = _table_of_e4m3()


def encode_e4m3(values: Values) -> Values:
    """Round to nearest even and saturate at 448 (.satfinite); NaN becomes the code 0x7F."""
    x = np.asarray(values, np.float64)
    size = np.minimum(np.abs(x), _E4M3_MAX)
    exponent = np.maximum(np.floor(np.log2(np.where(size > 0, size, 1.0))), _E4M3_TINY)
    step = np.exp2(exponent - _E4M3_STEP)
    rounded = np.rint(size / step) * step
    fine = np.where(np.isnan(rounded), 0.0, rounded)
    # Codes of growing magnitude stand for growing values, so a value's code is its position among them.
    codes = np.searchsorted(E4M3_VALUES[:127], fine.astype(np.float32)).astype(np.uint8)
    codes = np.where(np.isnan(x), np.uint8(0x7F), codes | (np.signbit(x).astype(np.uint8) << 7))
    return np.asarray(codes, np.uint8)


def convert(i: Instruction) -> Operation:
    """cvt.<rounding>.<to>.<from>."""
    kinds = [p for p in i.parts if p in TYPES or p in ("e4m3x2", "e5m2x2", "tf32")]
    if len(kinds) != 2:
        raise unsupported(i)
    to, source = kinds
    if to == "e4m3x2":
        return _to_e4m3(i, source)
    if source == "e4m3x2" and to == "f16x2":
        return _from_e4m3(i)
    if to == "f16x2" and source == "f32":
        return _to_half2(i)
    if to not in TYPES or source not in TYPES:
        raise unsupported(i)
    function = _conversion(i, to, source)
    read, write = reader(i.operands[1], source, i), writer(i.operands[0], to, i)

    def run(m: Machine, lanes: Lanes) -> None:
        write(m, lanes, function(read(m, lanes)))

    return run


#: Rounding to whole numbers: to the nearest even one, towards zero, down, up.
_TO_WHOLE: dict[str, Any] = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}


def _conversion(i: Instruction, to: str, source: str) -> Any:
    target, origin = dtype_of(to), dtype_of(source)
    if "bf16" in (to, source):
        return _bfloat(i, to)
    if target.kind in "iu" and origin.kind in "iu":
        if "sat" in i.parts:
            limits = np.iinfo(target)
            return lambda a: np.clip(a, limits.min, limits.max).astype(target)
        return lambda a: np.asarray(a).astype(target)
    modes = [_TO_WHOLE[p] for p in i.parts if p in _TO_WHOLE]
    if target.kind in "iu":
        if not modes:
            raise unsupported(i)
        limits = np.iinfo(target)
        mode: Any = modes[0]

        def to_integer(a: Values) -> Values:
            whole = mode(np.asarray(a, np.longdouble))
            whole = np.where(np.isnan(whole), 0, np.clip(whole, limits.min, limits.max))
            return np.asarray(whole).astype(target)

        return to_integer
    if modes and to == source and not {"ftz", "sat"} & set(i.parts):
        return modes[0]
    if modes and origin.kind == "f":
        raise unsupported(i)
    if {"rz", "rm", "rp"} & set(i.parts):
        raise unsupported(i, "has a rounding mode that is not known to the emulator")
    if "sat" in i.parts:
        return lambda a: np.clip(np.nan_to_num(np.asarray(a)), 0, 1).astype(target)
    return lambda a: np.asarray(a).astype(target)


def _bfloat(i: Instruction, to: str) -> Any:
    if to == "bf16":

        def narrow(a: Values) -> Values:
            bits = np.asarray(a, np.float32).view(np.uint32).astype(np.uint64)
            rounded = (bits + 0x7FFF + (bits >> np.uint64(16) & np.uint64(1))) >> np.uint64(16)
            return np.where(np.isnan(a), 0x7FFF, rounded).astype(np.uint16)

        return narrow
    if to == "f32":
        return lambda a: (np.asarray(a).astype(np.uint32) << np.uint32(16)).view(np.float32)
    raise unsupported(i)


def _pair(i: Instruction, source: str) -> Any:
    """The two numbers of a two-operand or packed source: (upper, lower)."""
    if source == "f32":
        upper, lower = (reader(o, "f32", i) for o in i.operands[1:3])
        return lambda m, lanes: (upper(m, lanes), lower(m, lanes))
    if source == "f16x2":
        both = reader(i.operands[1], "b32", i)

        def split(m: Machine, lanes: Lanes) -> tuple[Values, Values]:
            bits = np.asarray(both(m, lanes))
            return (
                (bits >> np.uint32(16)).astype(np.uint16).view(np.float16),
                bits.astype(np.uint16).view(np.float16),
            )

        return split
    raise unsupported(i)


def _to_e4m3(i: Instruction, source: str) -> Operation:
    if "satfinite" not in i.parts:
        raise unsupported(i)
    read, write = _pair(i, source), writer(i.operands[0], "b16", i)

    def run(m: Machine, lanes: Lanes) -> None:
        upper, lower = read(m, lanes)
        write(m, lanes, encode_e4m3(upper).astype(np.uint16) << np.uint16(8) | encode_e4m3(lower))

    return run


def _from_e4m3(i: Instruction) -> Operation:
    read, write = reader(i.operands[1], "b16", i), writer(i.operands[0], "b32", i)
    halves = E4M3_VALUES.astype(np.float16).view(np.uint16).astype(np.uint32)

    def run(m: Machine, lanes: Lanes) -> None:
        codes = np.asarray(read(m, lanes))
        write(m, lanes, halves[codes >> np.uint16(8)] << np.uint32(16) | halves[codes & np.uint16(255)])

    return run


def _to_half2(i: Instruction) -> Operation:
    read, write = _pair(i, "f32"), writer(i.operands[0], "b32", i)

    def run(m: Machine, lanes: Lanes) -> None:
        upper, lower = (np.asarray(x).astype(np.float16).view(np.uint16).astype(np.uint32) for x in read(m, lanes))
        write(m, lanes, upper << np.uint32(16) | lower)

    return run


BUILDERS = {"cvt": convert}

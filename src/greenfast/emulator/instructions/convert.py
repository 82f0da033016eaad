"""cvt: conversions between numbers, with the 8-bit formats (PTX ISA, "cvt")."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from greenfast.emulator.instructions.floats import KINDS, parse_element, rounding
from greenfast.emulator.instructions.operands import TYPES, Function, parse_dtype, reader, writer
from greenfast.emulator.instructions.rounding import (
    FORMATS,
    NAN_BITS,
    bf16_values,
    canonical,
    flush,
    flush_rounded,
    integer_to_odd,
    narrow,
    round_to_double,
    widen,
)
from greenfast.emulator.machine.blocks import ThreadSet, Values
from greenfast.emulator.machine.state import Operation, ResidentBlocks
from greenfast.emulator.ptx.syntax import Instruction

_EIGHT_BITS = ("e4m3x2", "e5m2x2")
_TO_INTEGER: dict[str, Function] = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}


#: The 8-bit formats; ml_dtypes has all their codes, and rounds float32 to the nearest as the hardware does.
_DTYPES = {"e4m3": np.dtype(ml_dtypes.float8_e4m3fn), "e5m2": np.dtype(ml_dtypes.float8_e5m2)}
_TABLES = {name: np.arange(256, dtype=np.uint8).view(dtype).astype(np.float32) for name, dtype in _DTYPES.items()}
_LARGEST = {name: table[np.isfinite(table)].max() for name, table in _TABLES.items()}
E4M3_VALUES, E5M2_VALUES = _TABLES["e4m3"], _TABLES["e5m2"]


#: By type of a pair of codes, the bits of the f16 of each code.
HALVES = {
    f"{name}x2": np.where(np.isnan(x), NAN_BITS["f16"], x.astype(np.float16).view(np.uint16)).astype(np.uint16)
    for name, x in _TABLES.items()
}


def encode(values: Values, name: str) -> Values:
    """Codes of float16 or float32 numbers in an 8-bit format, to the nearest even and saturated (.satfinite).

    NaN becomes 0x7F. ml_dtypes alone gives NaN or infinity beyond the largest number, and keeps the sign of NaN.
    """
    x, largest = np.asarray(values, np.float32), _LARGEST[name]
    bad = np.isnan(x)
    codes = np.clip(np.where(bad, np.float32(0), x), -largest, largest).astype(_DTYPES[name]).view(np.uint8)
    return np.where(bad, np.uint8(0x7F), codes)


def convert(i: Instruction) -> Operation:
    """Build cvt.<rounding>.<to>.<from>."""
    if "pack" in i.parts:
        return _packed(i)
    to, source = (p for p in i.parts if p in TYPES or p in ("tf32", *_EIGHT_BITS))
    if to in _EIGHT_BITS:
        return _to_eight_bits(i, to, source)
    if source in _EIGHT_BITS:
        return _from_eight_bits(i, source)
    if to in ("f16x2", "bf16x2"):
        return _to_pair(i, to)
    function = _conversion(i, to, source)
    read, write = reader(i.operands[1], source, i), writer(i.operands[0], "b32" if to == "tf32" else to, i)

    def run(m: ResidentBlocks, lanes: ThreadSet) -> None:
        write(m, lanes, function(read(m, lanes)))

    return run


def _conversion(i: Instruction, to: str, source: str) -> Function:
    if to == "tf32":
        function = _to_float(i, to, source)
        return lambda a: function(a).view(np.uint32)
    if (to, source) == ("f32", "bf16") and not {"ftz", "sat"} & set(i.parts):
        return lambda a: bf16_values(np.asarray(a))  # NaN as it is
    if to in KINDS:
        return _to_float(i, to, source)
    if source in KINDS:
        return _float_to_integer(i, to, source)
    target = parse_dtype(to)
    if "sat" not in i.parts:
        return lambda a: np.asarray(a).astype(target)
    limits, own = np.iinfo(target), np.iinfo(parse_dtype(source))
    low, high = max(limits.min, own.min), min(limits.max, own.max)
    return lambda a: np.clip(a, low, high).astype(target)


def _float_to_integer(i: Instruction, to: str, source: str) -> Function:
    """Clamped to the target's range. NaN gives 0, or the top bit alone from f64 and to 64 bits."""
    mode: Any = next(_TO_INTEGER[p] for p in i.parts if p in _TO_INTEGER)
    target = parse_dtype(to)
    limits, bits = np.iinfo(target), 8 * target.itemsize
    nan = parse_dtype(f"u{bits}").type(1 << (bits - 1) if source == "f64" or bits == 64 else 0).astype(target)

    def function(a: Values) -> Values:
        whole = mode(widen(flush(a, "f32") if "ftz" in i.parts else a, source))
        above, below = whole >= 2.0 ** (bits - (target.kind == "i")), whole < limits.min
        inside = np.where(above | below | np.isnan(whole), 0, whole).astype(target)
        result = np.where(above, target.type(limits.max), np.where(below, target.type(limits.min), inside))
        return np.where(np.isnan(whole), nan, result)

    return function


def _to_float(i: Instruction, to: str, source: str) -> Function:
    """From integers and floats; .rni and the like leave an integral number, .ftz flushes float32 only."""
    mode = rounding(i)
    whole: Any = next((_TO_INTEGER[p] for p in i.parts if p in _TO_INTEGER), None)
    flushes, saturates, clamps = ("ftz" in i.parts, "sat" in i.parts, "relu" in i.parts)
    largest = FORMATS[to].largest if "satfinite" in i.parts else None

    def function(a: Values) -> Values:
        if source not in KINDS:
            return _integer_to_float(np.asarray(a), to, mode)
        a = flush(a, "f32") if flushes and source == "f32" else a
        x = widen(a, source)
        if whole is not None:
            x = whole(x)
        if saturates:  # NaN becomes +0, and so does -0
            x = np.where(x > 0, np.minimum(x, 1), 0.0)
        if clamps:
            x = np.where(x > 0, x, np.where(np.isnan(x), x, 0.0))
        if largest is not None:
            x = np.clip(x, -largest, largest)
        result = narrow(x, to, mode)
        if flushes and to == "f32":
            result = flush_rounded(result, to, mode, lambda mask: x[mask])
        return _with_nan(result, x, a, i, to, source) if np.isnan(x).any() else result

    return function


def _with_nan(result: Values, x: Values, a: Values, i: Instruction, to: str, source: str) -> Values:
    """Replace canonical NaN results of a conversion by the NaN that the hardware produces.

    As seen on H100, 2026-11-21: to and from float64 a NaN keeps its sign and as much payload as fits, and becomes quiet
    (F2F). .ftz on a float32 is a multiplication with a canonical NaN before the conversion. cvt.rna to TF32 is integer
    arithmetic in SASS and truncates a NaN to the bits of TF32; .satfinite subtracts one from them, as for infinity.
    """
    bits, unsigned = 8 * result.dtype.itemsize, np.dtype(f"u{result.dtype.itemsize}")
    if to == "tf32" and "rna" in i.parts:
        saved = a.view(unsigned) & unsigned.type(0xFFFF_E000)
        nan = saved - unsigned.type(0x2000) if "satfinite" in i.parts else saved
    elif "f64" in (to, source):
        if source == "f32" and "ftz" in i.parts:
            a = canonical(a, source)
        own = 8 * a.dtype.itemsize
        old = a.view(f"u{a.dtype.itemsize}").astype(np.uint64)
        sign, payload = old >> np.uint64(own - 1), old << np.uint64(64 - FORMATS[source].precision + 1)
        fraction = FORMATS[to].precision - 1
        quiet = (1 << (bits - 1)) - (1 << (fraction - 1))
        nan = (sign << np.uint64(bits - 1) | np.uint64(quiet) | payload >> np.uint64(64 - fraction)).astype(unsigned)
    else:
        return result
    return np.where(np.isnan(x), nan, result.view(unsigned)).view(result.dtype)


def _integer_to_float(a: Values, to: str, mode: str) -> Values:
    if to != "f64":
        return narrow(integer_to_odd(a), to, mode)
    if mode == "rn":
        return a.astype(np.float64)
    flat = [round_to_double(int(n), mode) for n in a.reshape(-1)]  # at most 64 bits: Python's integers round them right
    return np.array(flat, np.float64).reshape(a.shape)


def _pair(i: Instruction, source: str) -> Callable[[ResidentBlocks, ThreadSet], tuple[Values, Values]]:
    """Return the two numbers of a two-operand or packed source: (upper, lower)."""
    if source == "f32":
        upper, lower = (reader(o, "f32", i) for o in i.operands[1:3])
        return lambda m, lanes: (upper(m, lanes), lower(m, lanes))
    both = reader(i.operands[1], "b32", i)

    def split(m: ResidentBlocks, lanes: ThreadSet) -> tuple[Values, Values]:
        bits = np.asarray(both(m, lanes))
        return ((bits >> np.uint32(16)).astype(np.uint16).view(np.float16), bits.astype(np.uint16).view(np.float16))

    return split


def _to_eight_bits(i: Instruction, to: str, source: str) -> Operation:
    read, write = _pair(i, source), writer(i.operands[0], "b16", i)
    name, clamps = parse_element(to), "relu" in i.parts

    def code(values: Values) -> Values:
        if clamps:
            values = np.where(values < 0, np.zeros_like(values), np.where(values == 0, np.abs(values), values))
        return encode(values, name).astype(np.uint16)

    def run(m: ResidentBlocks, lanes: ThreadSet) -> None:
        upper, lower = read(m, lanes)
        write(m, lanes, code(upper) << np.uint16(8) | code(lower))

    return run


def _from_eight_bits(i: Instruction, source: str) -> Operation:
    read, write = reader(i.operands[1], "b16", i), writer(i.operands[0], "b32", i)
    halves = HALVES[source].astype(np.uint32)
    if "relu" in i.parts:
        halves = np.where(_TABLES[parse_element(source)] <= 0, np.uint32(0), halves)

    def run(m: ResidentBlocks, lanes: ThreadSet) -> None:
        codes = np.asarray(read(m, lanes))
        write(m, lanes, halves[codes >> np.uint16(8)] << np.uint32(16) | halves[codes & np.uint16(255)])

    return run


def _packed(i: Instruction) -> Operation:
    """Build cvt.pack: two integers, saturated, into the lowest bits; of bytes a third operand shifted above them."""
    kind = next(p for p in i.parts if p in TYPES)
    bits = 8 * parse_dtype(kind).itemsize
    limits = np.iinfo(parse_dtype(kind))
    read = [reader(o, "s32", i) for o in i.operands[1:3]]
    above = reader(i.operands[3], "b32", i) if bits == 8 else None
    write = writer(i.operands[0], "b32", i)

    def run(m: ResidentBlocks, lanes: ThreadSet) -> None:
        high, low = (np.clip(r(m, lanes), limits.min, limits.max).astype(np.int64) & ((1 << bits) - 1) for r in read)
        result = high << bits | low
        if above is not None:
            result = result | np.asarray(above(m, lanes)).astype(np.int64) << 2 * bits
        write(m, lanes, (result & 0xFFFF_FFFF).astype(np.uint32))

    return run


def _to_pair(i: Instruction, to: str) -> Operation:
    """Two float32 into a register of halves, the first of them into its upper half."""
    read, write = _pair(i, "f32"), writer(i.operands[0], "b32", i)
    function = _to_float(i, parse_element(to), "f32")

    def run(m: ResidentBlocks, lanes: ThreadSet) -> None:
        upper, lower = (np.asarray(function(x)).view(np.uint16).astype(np.uint32) for x in read(m, lanes))
        write(m, lanes, upper << np.uint32(16) | lower)

    return run


BUILDERS = {"cvt": convert}

"""Comparison and selection: setp, set, selp, slct (PTX ISA, "Comparison and Selection Instructions")."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from greenfast.emulator.instructions.floats import KINDS, halves, parse_element
from greenfast.emulator.instructions.operands import (
    TYPES,
    Function,
    Reader,
    elementwise,
    list_items,
    parse_dtype,
    parse_type,
    reader,
    writer,
)
from greenfast.emulator.instructions.rounding import flush, widen
from greenfast.emulator.machine.blocks import ThreadSet, Values
from greenfast.emulator.machine.state import Operation, ResidentBlocks
from greenfast.emulator.ptx.syntax import Instruction

_COMPARE: dict[str, Function] = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
    "lo": np.less, "ls": np.less_equal, "hi": np.greater, "hs": np.greater_equal,
}  # fmt: skip
#: 1.0 in a float.
_ONES = {"f16": 0x3C00, "bf16": 0x3F80, "f32": 0x3F80_0000}
_LOGIC: dict[str, Function] = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}


def _ordered(name: str, of_floats: bool) -> Function:
    """Return the comparison of that name. One of floats is false with NaN, its unordered form (ltu, ...) true."""
    if not of_floats:
        return _COMPARE[name]
    if name == "num":
        return lambda a, b: ~np.isnan(a) & ~np.isnan(b)
    if name == "nan":
        return lambda a, b: np.isnan(a) | np.isnan(b)
    if name == "ne":
        return lambda a, b: (a != b) & ~np.isnan(a) & ~np.isnan(b)
    if name in _COMPARE:
        return _COMPARE[name]
    unordered = _COMPARE[name.removesuffix("u")]
    return lambda a, b: unordered(a, b) | np.isnan(a) | np.isnan(b)


def _comparison(i: Instruction) -> Function:
    """Return the comparison of setp and set as a function of sources; of packed halves along a separate last axis."""
    kind = parse_type(i)
    compare = _ordered(i.parts[0], kind in KINDS)
    if kind not in KINDS or kind == "f64":
        return compare
    element = parse_element(kind)
    half = parse_dtype(element)

    def run(*sources: Values) -> Values:
        if kind.endswith("x2"):
            sources = tuple(halves(sources, half))
        if "ftz" in i.parts:
            sources = tuple(flush(s, element) for s in sources)
        return np.asarray(compare(*(widen(s, element) if element == "bf16" else s for s in sources)))

    return run


def _combined(i: Instruction) -> tuple[Function | None, Reader | None]:
    """Return the logic operation that takes a third operand in, and its reader."""
    if len(i.operands) < 4:
        return None, None
    return next(_LOGIC[p] for p in i.parts if p in _LOGIC), reader(i.operands[3], "pred", i)


def setp(i: Instruction) -> Operation:
    """Build setp. A second predicate gets the complement, or of packed halves the comparison of the upper ones."""
    kind = parse_type(i)
    compare = _comparison(i)
    write = [writer(t, "pred", i) for t in list_items(i.operands[0])]
    read = [reader(o, kind, i) for o in i.operands[1:3]]
    combine, third = _combined(i)

    def run(m: ResidentBlocks, lanes: ThreadSet) -> None:
        result = np.asarray(compare(read[0](m, lanes), read[1](m, lanes)))
        both = (result[..., 0], result[..., 1]) if kind.endswith("x2") else (result, ~result)
        if combine and third:  # before a write: the third operand may be one of the results
            supplied = third(m, lanes)
            both = (combine(both[0], supplied), combine(both[1], supplied))
        for w, value in zip(write, both, strict=False):
            w(m, lanes, value)

    return run


def set_value(i: Instruction) -> Operation:
    """Build set: all ones, or 1.0 in a float, if the comparison is true, else zero; per packed half."""
    kind = parse_type(i)
    compare = _comparison(i)
    out = next(p for p in i.parts if p in TYPES)
    packed = kind.endswith("x2")
    bits = parse_dtype("u16" if packed else f"u{8 * parse_dtype(out).itemsize}").type
    yes = bits(_ONES.get(parse_element(out), int(~bits(0))))
    unsigned = "b32" if packed else f"b{8 * parse_dtype(out).itemsize}"
    write = writer(i.operands[0], unsigned, i)
    read = [reader(o, kind, i) for o in i.operands[1:3]]
    combine, third = _combined(i)

    def run(m: ResidentBlocks, lanes: ThreadSet) -> None:
        result = np.asarray(compare(read[0](m, lanes), read[1](m, lanes)))
        if combine and third:
            supplied = np.asarray(third(m, lanes))
            result = combine(result, supplied[..., None] if packed else supplied)
        values = np.where(result, yes, bits(0))
        write(m, lanes, np.ascontiguousarray(values).view(np.uint32)[..., 0] if packed else values)

    return run


def selp(i: Instruction) -> Operation:
    """Build selp."""
    kind = parse_type(i)
    return elementwise(i, lambda a, b, p: np.where(p, a, b), types=[kind, kind, "pred"])


def slct(i: Instruction) -> Operation:
    """Build slct: a where c >= 0, else b, also for NaN."""
    kind, third = (p for p in i.parts if p in TYPES)
    if "ftz" in i.parts:  # a subnormal c counts as zero
        function: Function = lambda a, b, c: np.where(flush(c, "f32") >= 0, a, b)  # noqa: E731
    else:
        function = lambda a, b, c: np.where(c >= 0, a, b)  # noqa: E731
    return elementwise(i, function, types=[kind, kind, third], out=kind)


BUILDERS: dict[str, Callable[[Instruction], Operation]] = {"setp": setp, "set": set_value, "selp": selp, "slct": slct}

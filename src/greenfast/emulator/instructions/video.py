"""Video instructions: on a part of a register each, or on two halves or four bytes at once (PTX ISA, "Video").

A selector after a register names the bytes that an operand is made of: %r1.b3, %r1.h0, %r1.b7210 (of both operands).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from greenfast.emulator.instructions.operands import Function, reader, writer
from greenfast.emulator.machine.blocks import ThreadSet, Values
from greenfast.emulator.machine.state import Operation, ResidentBlocks
from greenfast.emulator.ptx.syntax import Instruction, Operand, Register, Symbol
from greenfast.emulator.ptx.unsupported import unsupported

Wide = NDArray[np.int64]

_COMPARE: dict[str, Function] = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
}  # fmt: skip
_OPERATIONS: dict[str, Callable[[Wide, Wide], Wide]] = {
    "vadd": lambda a, b: a + b,
    "vsub": lambda a, b: a - b,
    "vabsdiff": lambda a, b: np.abs(a - b),
    "vmin": np.minimum,
    "vmax": np.maximum,
    "vavrg": lambda a, b: (a + b + (a + b >= 0)) >> 1,
}
_JOINS: dict[str, Callable[[Wide, Wide], Wide]] = {"add": lambda a, b: a + b, "min": np.minimum, "max": np.maximum}


def _split(operand: Operand) -> tuple[Operand, str]:
    """Return a register and the selector after it."""
    if isinstance(operand, Register) and "." in operand.name:
        name, _, selector = operand.name.partition(".")
        return Register(name), selector
    return operand, ""


def _signed(values: Wide, bits: int, kind: str) -> Wide:
    """Return the lowest bits of words as numbers of a type."""
    low = values & ((1 << bits) - 1)
    return np.where(low >> (bits - 1) & 1, low - (1 << bits), low) if kind[0] == "s" else low


def _limits(kind: str, bits: int) -> tuple[int, int]:
    return (-(1 << bits - 1), (1 << bits - 1) - 1) if kind[0] == "s" else (0, (1 << bits) - 1)


def _part(i: Instruction, operand: Operand, kind: str) -> Callable[[ResidentBlocks, ThreadSet], Wide]:
    """Build a function that gives an operand of a scalar instruction: a byte, a half or the word."""
    register, selector = _split(operand)
    read = reader(register, "u32", i)
    if selector not in ("", *(f"b{n}" for n in range(4)), "h0", "h1"):
        raise unsupported(i, f"has the selector .{selector}, unknown to the emulator,")
    bits = {"": 32, "b": 8, "h": 16}[selector[:1]]
    index = bits * int(selector[1:] or 0)
    return lambda m, lanes: _signed(np.asarray(read(m, lanes)).astype(np.int64) >> index, bits, kind)


def _operation(i: Instruction, name: str) -> Callable[[Wide, Wide], Wide]:
    """Return the function of an instruction on two numbers."""
    if name == "vset":
        compare = next(_COMPARE[p] for p in i.parts if p in _COMPARE)
        return lambda a, b: np.asarray(compare(a, b)).astype(np.int64)
    if name in ("vshl", "vshr"):
        clamps = "clamp" in i.parts

        def shifted(a: Wide, b: Wide) -> Wide:
            amount = np.minimum(b, 32) if clamps else b & 31
            return a << amount if name == "vshl" else a >> amount

        return shifted
    return _OPERATIONS[name]


def scalar(i: Instruction) -> Operation:
    """Build vadd, vsub, vabsdiff, vmin, vmax, vshl, vshr, vset, combined with c (.add, .min, .max) or merged into c."""
    kinds = [p for p in i.parts if p in ("u32", "s32")]
    out = "u32" if i.name == "vset" else kinds[0]
    left, right = kinds[-2:]
    target, merged = _split(i.operands[0])
    a, b = _part(i, i.operands[1], left), _part(i, i.operands[2], right)
    joins = next((_JOINS[p] for p in i.parts if p in _JOINS), None)
    if (bool(joins) or bool(merged)) != (len(i.operands) == 4) or (joins and merged):
        raise unsupported(i, "has operands that are not known to the emulator")
    if merged not in ("", *(f"b{n}" for n in range(4)), "h0", "h1"):
        raise unsupported(i)
    third = reader(i.operands[3], out, i) if len(i.operands) == 4 else None
    write = writer(target, "u32", i)
    operation, saturates = _operation(i, i.name), "sat" in i.parts
    if saturates and merged:
        raise unsupported(
            i, "saturates into a part of a register, for which ptxas gives other results than the PTX ISA"
        )
    if merged == "h1":
        raise unsupported(
            i, "writes the upper half of a register, for which ptxas takes other bits of the result than the PTX ISA"
        )
    bits = {"": 32, "b": 8, "h": 16}[merged[:1]]
    index = bits * int(merged[1:] or 0)

    def run(m: ResidentBlocks, lanes: ThreadSet) -> None:
        result = operation(a(m, lanes), b(m, lanes))
        if saturates:
            result = np.clip(result, *_limits(out, bits))
        if third is not None:
            c = np.asarray(third(m, lanes)).astype(np.int64)
            mask = ((1 << bits) - 1) << index
            result = joins(result, c) if joins else (c & ~mask) | (result << index & mask)
        write(m, lanes, (result & 0xFFFF_FFFF).astype(np.uint32))

    return run


def multiply_add(i: Instruction) -> Operation:
    """Build vmad: a * b + c, shifted. Negated operands are refused."""
    out, left, right = (p for p in i.parts if p in ("u32", "s32"))
    if len(i.operands) != 4 or any(isinstance(o, Symbol) for o in i.operands):
        raise unsupported(i, "has operands that are not known to the emulator")
    a, b = _part(i, i.operands[1], left), _part(i, i.operands[2], right)
    third, write = reader(i.operands[3], out, i), writer(i.operands[0], "u32", i)
    shift = 7 if "shr7" in i.parts else 15 if "shr15" in i.parts else 0
    saturates = "sat" in i.parts

    def run(m: ResidentBlocks, lanes: ThreadSet) -> None:
        result = (a(m, lanes) * b(m, lanes) + np.asarray(third(m, lanes)).astype(np.int64)) >> shift
        if saturates:
            result = np.clip(result, *_limits(out, 32))
        write(m, lanes, (result & 0xFFFF_FFFF).astype(np.uint32))

    return run


def _split_parts(words: Values, bits: int, kind: str) -> Wide:
    """Return (..., halves or bytes) of registers."""
    shifts = np.arange(0, 32, bits)
    return _signed(np.asarray(words).astype(np.int64)[..., None] >> shifts, bits, kind)


def _chosen(i: Instruction, selector: str, default: str, count: int) -> list[int]:
    """Return the halves or bytes of (a, b) that form an operand, lowest first."""
    letter, digits = ("h" if count == 2 else "b"), selector[1:] or default
    if (
        (selector and selector[0] != letter)
        or len(digits) != count
        or not all("0" <= d < str(2 * count) for d in digits)
    ):
        raise unsupported(i, f"has the selector .{selector}, unknown to the emulator,")
    return [int(d) for d in reversed(digits)]


def several(i: Instruction) -> Operation:
    """Build instructions on two halves or four bytes. For .add, c is added; else c fills masked-out parts."""
    count = int(i.name[-1])
    bits, name = 32 // count, i.name[:-1]
    kinds = [p for p in i.parts if p in ("u32", "s32")]
    out = "u32" if name == "vset" else kinds[0]
    left, right = kinds[-2:]
    if len(i.operands) != 4:
        raise unsupported(i, "has operands that are not known to the emulator")
    target, mask = _split(i.operands[0])
    (first, of_a), (second, of_b) = (_split(o) for o in i.operands[1:3])
    letter = "h" if count == 2 else "b"
    digits = mask[1:] or "3210"[4 - count :]
    if (mask and mask[0] != letter) or not all("0" <= d < str(count) for d in digits):
        raise unsupported(i, f"has the mask .{mask}, unknown to the emulator,")
    saved = np.array([str(n) in digits for n in range(count)])
    pick_a = _chosen(i, of_a, "10" if count == 2 else "3210", count)
    pick_b = _chosen(i, of_b, "32" if count == 2 else "7654", count)
    read = [reader(first, "u32", i), reader(second, "u32", i), reader(i.operands[3], "u32", i)]
    write = writer(target, "u32", i)
    operation, saturates, sums = _operation(i, name), "sat" in i.parts, "add" in i.parts
    shifts = np.arange(0, 32, bits)

    def run(m: ResidentBlocks, lanes: ThreadSet) -> None:
        a, b, c = np.broadcast_arrays(*(np.asarray(r(m, lanes)) for r in read))
        both = [
            np.concatenate([_split_parts(a, bits, kind), _split_parts(b, bits, kind)], axis=-1)
            for kind in (left, right)
        ]
        result = operation(both[0][..., pick_a], both[1][..., pick_b])
        if saturates:
            result = np.clip(result, *_limits(out, bits))
        if sums:
            total = np.where(saved, result, 0).sum(axis=-1) + c.astype(np.int64)
        else:
            low = (1 << bits) - 1
            total = (np.where(saved, result & low, _split_parts(c, bits, "u32")) << shifts).sum(axis=-1)
        write(m, lanes, (total & 0xFFFF_FFFF).astype(np.uint32))

    return run


BUILDERS: dict[str, Callable[[Instruction], Operation]] = {
    **dict.fromkeys(("vadd", "vsub", "vabsdiff", "vmin", "vmax", "vshl", "vshr", "vset"), scalar),
    "vmad": multiply_add,
    **{
        f"{name}{count}": several
        for name in ("vadd", "vsub", "vavrg", "vabsdiff", "vmin", "vmax", "vset")
        for count in (2, 4)
    },
}

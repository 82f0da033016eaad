"""Find the comparisons of a kernel that depend on what PTX does not define, and on where its buffers are."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass

from greenfast.emulator.machine.environment import UNDEFINED
from greenfast.emulator.ptx.syntax import (
    Address,
    Function,
    Immediate,
    Instruction,
    Register,
    Special,
    Symbol,
    list_registers,
)
from greenfast.spec.kernel import MAP_BYTES

#: Instructions that compute a predicate from values.
_COMPARES = ("setp", "testp", "isspacep")
#: Instructions without a destination as first operand.
_NO_RESULT = (
    *("st", "red", "bra", "brx", "bar", "barrier", "ret", "exit", "call", "fence", "membar", "nanosleep", "tensormap"),
)
#: Instructions that may load from global memory, and the spaces in which they do not.
_GLOBAL_LOADS = ("ld", "ldu", "call")
_OTHER_SPACES = {"param", "shared", "local", "const"}
#: Instructions after which an address is still one.
_KEEPS_ADDRESS = ("mov", "cvta", "add", "sub", "mad", "selp")
#: Integer instructions: the low bits of a result depend on the low bits of its operands only.
_KEEPS_LOW_BITS = (*_KEEPS_ADDRESS, "cvt", "mul", "neg", "not", "and", "or", "xor", "shl")
#: The alignment of buffers in bytes: an address modulo this number is defined.
_ALIGNMENT = 256


@dataclass(frozen=True)
class Dependence:
    """Dependences of a kernel on undefined values and on addresses.

    comparisons: by instruction number, the registers of UNDEFINED that its result may depend on. undefined: whether the
    kernel reads such a register. addresses: whether a comparison or a value that is no address depends on the address
    of a buffer. bits: comparisons of values that are computed from bits of an address above its alignment.
    """

    comparisons: dict[int, tuple[str, ...]]
    undefined: bool
    addresses: bool
    bits: tuple[int, ...]


def find_dependence(function: Function, pointers: Collection[tuple[str, int]]) -> Dependence:
    """Follow values through the registers of a function.

    pointers: parameters that hold addresses of buffers, by name and offset. What goes through memory is not followed.
    """
    reads = {o.name for i in function.code for o in i.operands if isinstance(o, Special)} & UNDEFINED
    undefined = _follow(function, lambda i: {o.name for o in i.operands if isinstance(o, Special)} & reads, loads=True)
    comparisons = {
        pc: tuple(sorted(sources))
        for pc, i in enumerate(function.code)
        if i.name in _COMPARES and (sources := _sources(i, undefined) | _specials(i, reads))
    }
    held = _follow(function, lambda i: _pointer(i, pointers), loads=False)
    addresses = any(
        i.name not in (*_KEEPS_ADDRESS, *_NO_RESULT, "ld", "atom", "prefetch", "cp", "mbarrier") and _sources(i, held)
        for i in function.code
    )
    masked = _find_alignment_masks(function, held)
    held = _follow(function, lambda i: _pointer(i, pointers), loads=False, ends=masked)
    no_start = (*_KEEPS_ADDRESS, *_NO_RESULT, *_COMPARES, "ld", "atom")
    taken = _follow(function, lambda i: set() if i.name in no_start else _sources(i, held), loads=True, ends=masked)
    bits = tuple(pc for pc, i in enumerate(function.code) if i.name in _COMPARES and _sources(i, taken))
    return Dependence(comparisons, bool(reads), addresses, bits)


def find_written_pointers(function: Function) -> set[str]:
    """Return the parameters through which a kernel may write: pointers, and tensor maps if it stores by any."""
    pointers = {(parameter.name, 0) for parameter in function.params}
    held = _follow(function, lambda i: _pointer(i, pointers), loads=False)
    written: set[str] = set()
    for i in function.code:
        if i.name in ("st", "red", "atom", "cp", "multimem"):
            addressed = i.operands[1:2] if i.name == "atom" else i.operands[:1]
            written.update(*(held.get(name, ()) for operand in addressed for name in list_registers(operand)))
        if i.name == "tensormap":  # the memory of the map, and the memory that a store by it may write
            written.update(*(held.get(name, ()) for operand in i.operands for name in list_registers(operand)))
        if i.name == "cp" and "tensor" in i.parts and i.parts.index("global") < len(i.parts) - 1:
            written |= {parameter.name for parameter in function.params if parameter.size == MAP_BYTES}
    return written


def find_early_reads(function: Function, pointers: Collection[tuple[str, int]]) -> tuple[set[str], set[str]]:
    """Return the parameters through which a kernel reads global memory before griddepcontrol.wait, and by ld.global.nc.

    pointers: as in ``find_dependence``. The name "" is for a load that is not through such a parameter. Bulk copies and
    writes are left out: machine code shows the latter.
    """
    held = _follow(function, lambda i: _pointer(i, pointers), loads=False)

    def find_sources(i: Instruction) -> set[str]:
        if i.name == "cp" and "bulk" in i.parts:
            return set()  # as in machine code, where its addresses do not show
        copies = i.name == "cp" and ("ca" in i.parts or "cg" in i.parts)
        sources = (
            set().union(*(held.get(name, ()) for name in list_registers(i.operands[1]))) if i.operands[1:] else set()
        )
        return sources if sources and (copies or i.name == "ld") else {""}

    before = {source for i in _find_before_wait(function) if _may_load_global(i) for source in find_sources(i)}
    constant = {source for i in function.code if i.name == "ld" and "nc" in i.parts for source in find_sources(i)}
    return before, constant


def _may_load_global(i: Instruction) -> bool:
    """Return whether an instruction may load from global memory, except by bulk copies."""
    if i.name == "cp":
        return bool({"ca", "cg"} & set(i.parts))
    return i.name in _GLOBAL_LOADS and not _OTHER_SPACES & {part.partition("::")[0] for part in i.parts}


def _find_before_wait(function: Function) -> list[Instruction]:
    """Return the instructions that a thread may execute before griddepcontrol.wait, if every branch goes both ways."""
    reached, pending = set[int](), [0]
    while pending:
        pc = pending.pop()
        if pc in reached or pc >= len(function.code):
            continue
        i = function.code[pc]
        reached.add(pc)
        if i.name == "griddepcontrol" and "wait" in i.parts and i.guard is None:
            continue
        if i.name in ("bra", "brx", "call"):
            targets = [
                function.labels[o.name] for o in i.operands if isinstance(o, Symbol) and o.name in function.labels
            ]
            pending += targets if i.name == "bra" and targets else function.labels.values()
        if i.guard is not None or i.name not in ("bra", "brx", "ret", "exit", "trap"):
            pending.append(pc + 1)
    return [function.code[pc] for pc in sorted(reached)]


def _specials(i: Instruction, names: Collection[str]) -> set[str]:
    return {o.name for o in i.operands if isinstance(o, Special) and o.name in names}


def _pointer(i: Instruction, pointers: Collection[tuple[str, int]]) -> set[str]:
    """Return the pointer parameter that an instruction loads."""
    if i.name != "ld" or "param" not in i.parts or len(i.operands) < 2:
        return set()
    location = i.operands[1]
    if isinstance(location, Address) and isinstance(location.base, Symbol):
        index = location.base.name, location.base.offset + location.offset
        return {index[0]} if index in pointers else set()
    return set()


def _find_alignment_masks(function: Function, held: dict[str, set[str]]) -> set[int]:
    """Return the numbers of instructions that keep only bits of an address below the alignment of buffers."""
    high = _follow(function, lambda i: set() if _keeps_low_bits(i) else _sources(i, held), loads=True)
    return {
        pc
        for pc, i in enumerate(function.code)
        if i.name == "and"
        and any(isinstance(o, Immediate) and 0 <= o.bits < _ALIGNMENT for o in i.operands[1:])
        and not _sources(i, high)
    }


def _keeps_low_bits(i: Instruction) -> bool:
    """Return whether the low bits of an instruction's result depend on the low bits of its operands only."""
    return (
        i.name in _KEEPS_LOW_BITS
        and not any(part in ("hi", "sat") or re.match(r"b?f\d", part) for part in i.parts)
        and isinstance(i.operands[0], Register)  # no halves of a register
        and (i.name != "shl" or isinstance(i.operands[2], Immediate))
    )


def _follow(
    function: Function,
    begins: Callable[[Instruction], set[str]],
    *,
    loads: bool,
    ends: Collection[int] = (),
) -> dict[str, set[str]]:
    """Return, by register, the origins that its value may depend on.

    loads: whether a loaded value depends on the origins of its address. ends: instructions with a result that depends
    on no origin.
    """
    held: dict[str, set[str]] = {}
    starts = [begins(i) for i in function.code]
    if not any(starts):
        return held
    changed = True
    while changed:
        changed = False
        for pc, (i, start) in enumerate(zip(function.code, starts, strict=True)):
            if i.name in _NO_RESULT or pc in ends:
                continue
            sources = start if i.name == "ld" and not loads else start | _sources(i, held)
            for name in list_registers(i.operands[0]) if sources and i.operands else ():
                before = held.setdefault(name, set())
                if not sources <= before:
                    before |= sources
                    changed = True
    return held


def _sources(i: Instruction, held: dict[str, set[str]]) -> set[str]:
    """Return the origins of the guard and of all operands after the first."""
    names = [name for operand in i.operands[1:] for name in list_registers(operand)]
    if i.guard is not None:
        names.append(i.guard[0])
    return {source for name in names for source in held.get(name.lstrip("!"), ())}

"""A function's instructions as operations, and which threads each of them needs together."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from greenfast.emulator.compiled.stretches import Liveness, Stretch
from greenfast.emulator.instructions import (
    access,
    arithmetic,
    bits,
    cluster,
    comparisons,
    convert,
    fences,
    fragments,
    map_fields,
    mbarrier,
    moves,
    subroutines,
    tiles,
    tma,
    warp,
    wgmma,
    wmma,
)
from greenfast.emulator.instructions.access import STRONG, parse_space
from greenfast.emulator.instructions.convergence import parse_sync_group
from greenfast.emulator.instructions.operands import TYPES, list_items
from greenfast.emulator.instructions.printf import call
from greenfast.emulator.machine.access_log import RestartWithReadTracking
from greenfast.emulator.machine.blocks import ThreadSet, lane_indices
from greenfast.emulator.machine.epochs import SPANS, RestartCompiled, RestartWarpByWarp
from greenfast.emulator.machine.ordering import DEVICE, parse_scope
from greenfast.emulator.machine.progress import find_endless_branches, find_polling_branches, is_polled
from greenfast.emulator.machine.state import Operation, ResidentBlocks
from greenfast.emulator.ptx.forms import count_operands, parse_vectors, refusal
from greenfast.emulator.ptx.recursion import JUMPS
from greenfast.emulator.ptx.syntax import (
    CLOCKS,
    Address,
    Function,
    Instruction,
    Operand,
    Register,
    Special,
    Symbol,
    Vector,
)
from greenfast.emulator.ptx.unsupported import unsupported
from greenfast.spec.errors import UnsupportedError

BUILDERS: dict[str, Callable[[Instruction], Operation]] = {
    **arithmetic.BUILDERS,
    **bits.BUILDERS,
    **comparisons.BUILDERS,
    **convert.BUILDERS,
    **moves.BUILDERS,
    **access.BUILDERS,
    **warp.BUILDERS,
    **fragments.BUILDERS,
    **tiles.BUILDERS,
    **mbarrier.BUILDERS,
    **tma.BUILDERS,
    **wgmma.BUILDERS,
    **wmma.BUILDERS,
    **cluster.BUILDERS,
    **fences.BUILDERS,
    **map_fields.BUILDERS,
    "call": call,
}
#: Instructions that order memory accesses or advise: every access here takes effect at once, so nothing is to be done.
NOTHING = ("prefetch", "prefetchu", "nanosleep", "pmevent", "setmaxnreg")
#: Instructions that are replaced by others before a program is built (ptx/inlining.py).
REPLACED = ("brx",)
CONTROL = ("bra", "ret", "exit", "bar", "barrier", "trap", "brkpt", *JUMPS)

#: Instructions through which warps communicate, or with an effect that depends on the order of the warps.
_ORDERED = ("atom", "red", "mbarrier", "wgmma", "call", "mapa", "getctarank", "tensormap", *JUMPS)
_MEMORY = ("ld", "ldu", "st", "cp", "wmma")
#: The smallest access in bytes, for programs without accesses below a word.
_WORD = 4


class Program:
    """A function's instructions as operations."""

    def __init__(self, function: Function, *, defer: bool = False) -> None:
        """Build the operations. Raise UnsupportedError for the first unknown instruction.

        defer: raise it when a thread executes the instruction, so that dead code is allowed.
        """
        self.function = function
        self.products = any(i.name == "wgmma" for i in function.code)
        self.operations = [self._build_or_defer(i) if defer else self._build(i) for i in function.code]
        self.joins = set(function.labels.values())
        self.targets = {pc: _resolve_target(i, function) for pc, i in enumerate(function.code) if i.name == "bra"}
        self.polling = find_polling_branches(function)
        self.endless = find_endless_branches(function)
        #: True if the function reads a clock.
        self.clocked = any(isinstance(o, Special) and o.name in CLOCKS for i in function.code for o in i.operands)
        #: Reads of memory that other threads may write before the reader's next instruction.
        self.polled = {pc for pc, i in enumerate(function.code) if is_polled(i)}
        #: True if threads wait for mbarriers.
        self.waits = any(i.name == "mbarrier" and i.parts[0] in ("try_wait", "test_wait") for i in function.code)
        #: Warps that lagged at an mbarrier in an earlier run.
        self.laggards: set[int] = set()
        #: True if threads may synchronize through memory.
        self.synchronizes = bool(self.polling) or any(_is_ordering(i) for i in function.code)
        #: True if some accesses to global memory are atomic only for their block or cluster.
        self.scoped = any(_is_scoped(i) for i in function.code)
        #: Loads of a place before an atomic access to it, by id: they need no order.
        self.looks = _find_looks(function)
        #: Bytes of the smallest access by space if warps may run in lockstep (lockstep.py), else None.
        self.lockstep_units = _find_lockstep_units(function)
        #: Buffers that a run has found to be both read and written.
        self.tracked: frozenset[str] = frozenset()
        #: Stretches to compile (compiled/stretches.py), without and with loads and stores; the way of compiling these.
        self.stretches: dict[bool, dict[int, Stretch]] = {}
        self.compiled_accesses = SPANS
        self.keys = [_count_key(i) for i in function.code]
        self.sync_groups = {pc: m for pc, i in enumerate(function.code) if (m := parse_sync_group(i)) is not None}

    @cached_property
    def liveness(self) -> Liveness:
        """The registers that are read later."""
        return Liveness(self.function)

    def prepare_restart(self, restart: RestartWithReadTracking | RestartCompiled | RestartWarpByWarp) -> None:
        """Change how the next run goes: with more reads recorded, other compiled accesses, or warp by warp."""
        if isinstance(restart, RestartWithReadTracking):
            self.tracked |= {restart.name}
        elif isinstance(restart, RestartCompiled):
            self.compiled_accesses = restart.mode
            for stretch in self.stretches[True].values():
                if "shared" in stretch.loads:
                    stretch.code.clear()
        else:
            self.lockstep_units = None

    def forcing(self, pc: int) -> Program:
        """Return a copy of the program that inverts each thread's first result of a comparison."""
        other = copy.copy(self)
        other.stretches = {False: {}, True: {}}  # machine code knows nothing of it
        other.operations = list(self.operations)
        other.operations[pc] = _invert(self.operations[pc], self.function.code[pc])
        return other

    def _build_or_defer(self, i: Instruction) -> Operation | None:
        """Return the operation of an instruction, or one that raises for an unknown instruction."""
        try:
            return self._build(i)
        except UnsupportedError as e:
            return _build_refusal(str(e))

    def _build(self, i: Instruction) -> Operation | None:
        if i.name.endswith("~"):
            return subroutines.build(i, self.function)
        refused = refusal(i.name, i.parts)
        if refused:
            raise unsupported(i, refused)
        _check_operands(i)
        if i.name == "barrier" and i.parts[0] == "cluster":
            return cluster.barrier(i)
        if i.name in CONTROL or i.name in NOTHING:
            return None
        if i.name == "mov" and self.products and wgmma.is_plain(i):
            return wgmma.move(i)
        if i.name == "mov" and self.products and wgmma.is_repacking(i):
            return wgmma.repack(i)
        try:
            return BUILDERS[i.name](i)
        except (ValueError, IndexError, KeyError, TypeError, AttributeError, AssertionError, StopIteration) as e:
            raise unsupported(i, "has operands that are not known to the emulator") from e


def _check_operands(i: Instruction) -> None:
    """Refuse an instruction with more or fewer operands, or elements of a vector, than its form has."""
    least, limit = count_operands(i.name, i.parts)
    if not least <= len(i.operands) <= limit:
        wanted = str(least) if least == limit else f"{least} to {limit}"
        raise unsupported(i, f"has {len(i.operands)} operands in place of {wanted}")
    which, count = parse_vectors(i.name, i.parts)
    for position in which:
        operand = i.operands[position]
        supplied = len(operand.items) if isinstance(operand, Vector) else 1
        if supplied != count:
            raise unsupported(i, f"has {supplied} elements in place of {count}")


def _invert(operation: Operation | None, i: Instruction) -> Operation:
    target = i.operands[0]
    names = [o.name for o in list_items(target) if isinstance(o, Register)]

    def run(m: ResidentBlocks, lanes: ThreadSet) -> NDArray[np.intp] | None:
        stay = operation(m, lanes) if operation is not None else None
        if m.compared is None:
            m.compared = np.zeros(m.lanes, np.bool_)
        indices = lane_indices(lanes)
        new = indices[~m.compared[indices]]
        m.compared[new] = True
        for name in names:
            m.register(name)[new] ^= True
        return stay

    return run


def _build_refusal(why: str) -> Operation:
    def refuse(m: ResidentBlocks, lanes: ThreadSet) -> None:
        raise UnsupportedError(why)

    return refuse


def _find_looks(function: Function) -> set[int]:
    """Return the loads, by id, with an atomic access to the same address after them in the code."""
    sources: dict[str, Operand] = {}
    for i in function.code:
        if i.name in ("mov", "cvta") and isinstance(i.operands[0], Register):
            sources[i.operands[0].name] = i.operands[1]

    def resolve(operand: Operand) -> tuple[Operand | None, int]:
        """Return the register or variable that an address was copied from, and the offset."""
        base, offset = (operand.base, operand.offset) if isinstance(operand, Address) else (operand, 0)
        for _ in range(len(sources)):
            if not isinstance(base, Register) or not isinstance(sources.get(base.name), Register | Symbol):
                break
            base = sources[base.name]  # type: ignore[assignment]
        return (Symbol(base.name), offset + base.offset) if isinstance(base, Symbol) else (base, offset)

    code = [*enumerate(function.code)]
    last = {resolve(i.operands[i.name == "atom"]): pc for pc, i in code if i.name in ("atom", "red") and i.operands}
    return {id(i) for pc, i in code if i.name == "ld" and last.get(resolve(i.operands[-1]), -1) > pc}


def _is_ordering(i: Instruction) -> bool:
    """Return whether an instruction orders other memory accesses between threads."""
    if i.name in ("membar", "fence"):
        return i.parts[:1] not in (("proxy",), ("mbarrier_init",))
    return i.name in ("ld", "st", "atom", "red") and not {"acquire", "release", "acq_rel"}.isdisjoint(i.parts)


def _find_lockstep_units(function: Function) -> dict[str, int] | None:
    """Return the bytes of the smallest access by space; None if the function's warps must run one after the other."""
    if any(_is_ordered(i) for i in function.code):
        return None
    units = {"shared": _WORD, "global": _WORD}
    for i in function.code:
        sizes = [int(np.dtype(TYPES[part]).itemsize) for part in i.parts if part in TYPES]
        if i.name in _MEMORY and sizes:
            for space in units:
                if parse_space(i) in (space, "generic"):
                    units[space] = min(units[space], *sizes)
    return units


def _is_ordered(i: Instruction) -> bool:
    """Return whether the effect of an instruction may depend on the order of the warps."""
    if i.name in _ORDERED or any(isinstance(o, Special) and o.name in CLOCKS for o in i.operands):
        return True
    if i.name in ("ld", "st"):
        return not STRONG.isdisjoint(i.parts) or "async" in i.parts
    if i.name == "cp":
        return "bulk" in i.parts or "mbarrier" in i.parts
    if i.name in ("bar", "barrier"):  # parts of a block meet at barriers with a number of threads
        return not {"arrive", "cluster"}.isdisjoint(i.parts) or ("sync" in i.parts and len(i.operands) > 1)
    return False


def _is_scoped(i: Instruction) -> bool:
    """Return whether an access may be to global memory with block or cluster scope."""
    shared = any(part.startswith("shared") for part in i.parts)
    return i.name in ("ld", "st", "atom", "red") and not shared and parse_scope(i.parts) < DEVICE


def _resolve_target(i: Instruction, function: Function) -> int:
    label = i.operands[0]
    if not isinstance(label, Symbol) or label.name not in function.labels:
        raise unsupported(i)
    return function.labels[label.name]


def _count_key(i: Instruction) -> str:
    """Return the name under which an instruction is counted."""
    if i.name in ("ld", "st", "wmma", "cp", "mbarrier", "wgmma"):
        return ".".join((i.name, *(p for p in i.parts[:2] if not p.startswith("v") and not p[1:].isdigit())))
    return i.name

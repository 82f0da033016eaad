"""Functions that call themselves, directly or through others: subroutines, with a stack of frames for each thread.

All other calls are inlined. A recursive function's code stands once, behind the kernel's. A call keeps the caller's
registers and local variables on the stack, if the caller is recursive itself, fills the parameters and jumps; the
return jumps back, takes the results, and puts back what was kept. Four instructions that no PTX has do this.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from greenfast.emulator.faults import UnsupportedError
from greenfast.emulator.ptx import Address, Function, Instruction, Module, Operand, Register, Symbol, Vector

if TYPE_CHECKING:
    from greenfast.emulator.machine import Lanes, Machine, Operation

#: Jump to a label, and back; keep a function's frame, and put it back; copy a variable to another as it is.
ENTER, LEAVE, KEEP, RESTORE, COPY = "call~", "ret~", "keep~", "restore~", "copy~"
JUMPS = (ENTER, LEAVE)
#: Calls within each other. A thread's stack is 1 KiB unless the host asks for more; a frame takes 16 bytes at least.
DEEPEST = 1024


def recursive(module: Module) -> set[str]:
    """The names of the functions that call themselves, directly or through others."""
    calls = {
        name: {o.name for i in f.code if i.name == "call" for o in i.operands if isinstance(o, Symbol)}
        for name, f in module.functions.items()
    }
    found = set()
    for name in calls:
        reached, queue = set[str](), list(calls[name])
        while queue:
            other = queue.pop()
            if other in calls and other not in reached:
                reached.add(other)
                queue += calls[other]
        if name in reached:
            found.add(name)
    return found


@dataclass
class Frame:
    """What belongs to a call of a recursive function: names of its registers, and its variables with their bytes."""

    registers: list[str] = field(default_factory=list)
    variables: dict[str, int] = field(default_factory=dict)


def frame_of(function: Function, start: int, end: int, name: str) -> Frame:
    """The frame of the function whose code stands from ``start`` to ``end`` of a body.

    Raises UnsupportedError where the function takes the address of a variable in its frame, which here is the same in
    every call.
    """
    frame = Frame()
    registers = set[str]()
    for i in function.code[start:end]:
        for operand in i.operands:
            _collect(operand, registers, frame, function)
        if i.guard is not None:
            registers.add(i.guard[0])
        if i.name in ("mov", "cvta"):
            taken = [o.name for o in i.operands if isinstance(o, Symbol) and o.name in frame.variables]
            if taken:
                raise UnsupportedError(
                    f"{name} calls itself and takes the address of its local variable {taken[0]}, which is not known "
                    f"to the emulator, at {i.source or 'unknown line'}: {i.text}"
                )
    frame.registers = sorted(registers - {"_"})
    return frame


def _collect(operand: Operand, registers: set[str], frame: Frame, function: Function) -> None:
    if isinstance(operand, Register):
        registers.add(operand.name)
    elif isinstance(operand, Vector):
        for item in operand.items:
            _collect(item, registers, frame, function)
    elif isinstance(operand, Address) and operand.base is not None:
        _collect(operand.base, registers, frame, function)
        for item in operand.coordinates:
            _collect(item, registers, frame, function)
    elif isinstance(operand, Symbol):
        variable = function.variables.get(operand.name)
        if variable is not None and variable.space == "local":
            frame.variables[operand.name] = variable.size
        if operand.name.startswith("!"):
            registers.add(operand.name[1:])


class Stack:
    """The frames of a machine's threads: how deep each is in calls, where it returns to, and what it keeps."""

    def __init__(self, lanes: int) -> None:
        self.depth = np.zeros(lanes, np.int64)
        self.returns: list[NDArray[np.int64]] = []
        self.kept: list[dict[str, NDArray[Any]]] = []

    def push(self, lanes: NDArray[np.intp], pc: int) -> None:
        """Threads call, to return to an instruction."""
        depths = self.depth[lanes]
        while len(self.returns) <= int(depths.max()):
            self.returns.append(np.zeros(len(self.depth), np.int64))
        for depth in np.unique(depths):
            self.returns[depth][lanes[depths == depth]] = pc
        self.depth[lanes] += 1

    def pop(self, lanes: NDArray[np.intp]) -> NDArray[np.int64]:
        """Threads return; gives where to."""
        self.depth[lanes] -= 1
        found = np.zeros(len(lanes), np.int64)
        for depth in np.unique(self.depth[lanes]):
            here = self.depth[lanes] == depth
            found[here] = self.returns[depth][lanes[here]]
        return found

    def slot(self, depth: int, name: str, like: NDArray[Any], width: int) -> NDArray[Any]:
        """Where a register (width 0) or a variable of ``width`` bytes is kept at a depth."""
        while len(self.kept) <= depth:
            self.kept.append({})
        slots = self.kept[depth]
        if name not in slots:
            shape = (len(self.depth), width) if width else (len(self.depth),)
            slots[name] = np.zeros(shape, like.dtype)
        return slots[name]


def jump(m: Machine, i: Instruction, lanes: NDArray[np.intp], pc: int) -> NDArray[np.int64]:
    """Where threads go on behind a call or a return of a recursive function."""
    if i.name == LEAVE:
        return m.stack.pop(lanes)
    deep = m.stack.depth[lanes] >= DEEPEST
    if deep.any():
        raise m.fault(f"calls within each other more than {DEEPEST} deep, more than a stack holds", int(lanes[deep][0]))
    m.stack.push(lanes, pc + 1)
    target = i.operands[0]
    assert isinstance(target, Symbol)
    return np.full(len(lanes), m.function.labels[target.name], np.int64)


def _places(m: Machine, name: str, size: int, lanes: NDArray[np.intp]) -> NDArray[np.int64]:
    """(threads, size) places of the bytes of a variable in local memory."""
    return m.local_start[lanes][:, None] + m.local_layout[name] + np.arange(size)[None, :]


def build(i: Instruction, function: Function) -> Operation | None:
    """The operation of one of the instructions above; None for jumps, which are the scheduler's."""
    if i.name in JUMPS:
        return None
    if i.name == COPY:
        to, source = (o.name for o in i.operands if isinstance(o, Symbol))
        size = min(function.variables[to].size, function.variables[source].size)

        def copy(m: Machine, lanes: Lanes) -> None:
            indices = _indices(lanes)
            into, out = _places(m, to, size, indices), _places(m, source, size, indices)
            m.local.data[into], m.local.state[into] = m.local.data[out], m.local.state[out]

        return copy
    frame, keeps = function.frames[i.parts[0]], i.name == KEEP

    def run(m: Machine, lanes: Lanes) -> None:
        indices = _indices(lanes)
        for depth in np.unique(m.stack.depth[indices]):
            here = indices[m.stack.depth[indices] == depth]
            for name in frame.registers:
                register = m.register(name)
                _move(m.stack.slot(depth, name, register, 0), here, register, here, keeps)
            for name, size in frame.variables.items():
                places = _places(m, name, size, here)
                for what, array in (("data", m.local.data), ("state", m.local.state)):
                    _move(m.stack.slot(depth, f"{name} {what}", array, size), here, array, places, keeps)

    return run


def _move(slot: NDArray[Any], here: Any, array: NDArray[Any], places: Any, keeps: bool) -> None:
    if keeps:
        slot[here] = array[places]
    else:
        array[places] = slot[here]


def _indices(lanes: Lanes) -> NDArray[np.intp]:
    return np.arange(lanes.start, lanes.stop) if isinstance(lanes, slice) else lanes

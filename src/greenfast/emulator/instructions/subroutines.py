"""Calls of recursive functions: jumps there and back, with frames on a stack of each thread."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from greenfast.emulator.machine.blocks import ThreadSet, lane_indices
from greenfast.emulator.machine.state import Operation, ResidentBlocks
from greenfast.emulator.ptx.recursion import COPY, JUMPS, KEEP, LEAVE
from greenfast.emulator.ptx.syntax import Function, Instruction, Symbol

#: Depth of nested calls. A thread's stack is 1 KiB by default; a frame takes at least 16 bytes.
DEEPEST = 1024


def jump(m: ResidentBlocks, i: Instruction, lanes: NDArray[np.intp], pc: int) -> NDArray[np.int64]:
    """Return the next instruction of threads at a call or return of a recursive function."""
    if i.name == LEAVE:
        return m.stack.pop(lanes)
    deep = m.stack.depth[lanes] >= DEEPEST
    if deep.any():
        raise m.fault(f"calls within each other more than {DEEPEST} deep, more than a stack holds", int(lanes[deep][0]))
    m.stack.push(lanes, pc + 1)
    target = i.operands[0]
    assert isinstance(target, Symbol)
    return np.full(len(lanes), m.function.labels[target.name], np.int64)


def _places(m: ResidentBlocks, name: str, size: int, lanes: NDArray[np.intp]) -> NDArray[np.int64]:
    """Return (threads, size) places of the bytes of a variable in local memory."""
    return m.local_start[lanes][:, None] + m.local_layout[name] + np.arange(size)[None, :]


def build(i: Instruction, function: Function) -> Operation | None:
    """Return the operation of one of the instructions above. The scheduler executes jumps: None."""
    if i.name in JUMPS:
        return None
    if i.name == COPY:
        to, source = (o.name for o in i.operands if isinstance(o, Symbol))
        size = min(function.variables[to].size, function.variables[source].size)

        def copy(m: ResidentBlocks, lanes: ThreadSet) -> None:
            indices = lane_indices(lanes)
            into, out = _places(m, to, size, indices), _places(m, source, size, indices)
            m.local.data[into], m.local.state[into] = m.local.data[out], m.local.state[out]

        return copy
    frame, keeps = function.frames[i.parts[0]], i.name == KEEP

    def run(m: ResidentBlocks, lanes: ThreadSet) -> None:
        indices = lane_indices(lanes)
        for depth in np.unique(m.stack.depth[indices]):
            here = indices[m.stack.depth[indices] == depth]
            for name in frame.registers:
                register = m.register(name)
                _move(m.stack.slot(depth, name, register, 0), here, register, here, keeps)
            for name, size in frame.variables.items():
                places = _places(m, name, size, here)
                for part, array in (("data", m.local.data), ("state", m.local.state)):
                    _move(m.stack.slot(depth, f"{name} {part}", array, size), here, array, places, keeps)

    return run


def _move(slot: NDArray[Any], here: Any, array: NDArray[Any], places: Any, keeps: bool) -> None:
    if keeps:
        slot[here] = array[places]
    else:
        array[places] = slot[here]

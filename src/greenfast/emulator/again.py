"""Run launches again: in the same memory, to find what they leave there, and in memory with other garbage."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from greenfast.emulator.machine.faults import KernelFaultError
from greenfast.emulator.machine.memory import LEFT, Bytes, GlobalMemory
from greenfast.emulator.machine.spare import Spare

if TYPE_CHECKING:
    from greenfast.emulator.grid import GridResult
    from greenfast.emulator.machine.state import Machine

#: Bytes that are NaN and -1, 0, and numbers that are neither (0.75 in float32).
_FILLS = (0xFF, 0x00, 0x3F)


@dataclass
class Garbage:
    """What reads of shared and local memory that nothing has written give: ``fill``, or what is ``found`` there.

    found, left: by launch and first block of those that run together, the bytes of shared and of local memory.
    """

    fill: int
    found: Mapping[tuple[int, int], tuple[Bytes, Bytes]] = field(default_factory=dict)
    left: dict[tuple[int, int], tuple[Bytes, Bytes]] = field(default_factory=dict)

    def begin(self, launch: int, machine: Machine) -> None:
        """Fill the memory of blocks before they begin."""
        found = self.found.get((launch, int(machine.blocks[0])))
        for arena, data in zip((machine.shared, machine.local), found or (None, None), strict=True):
            arena.fill_unwritten(self.fill)
            if data is not None and data.shape == arena.data.shape:
                arena.data[:] = data

    def end(self, launch: int, machine: Machine) -> None:
        """Keep what the blocks of the first run have left."""
        self.left.setdefault((launch, int(machine.blocks[0])), (machine.shared.data, machine.local.data))


class Beginning:
    """What memory holds before the first launch; ``variables``: the allocations that outlive a launch."""

    def __init__(self, memory: GlobalMemory, variables: Collection[str]) -> None:
        self._memory, self._variables = memory, variables
        self._data, self._state = memory.data.copy(), memory.state.copy()

    def _changed(self, name: str) -> NDArray[np.bool_]:
        start, end = self._memory.starts[name], self._memory.end_of(name)
        changed: NDArray[np.bool_] = self._memory.data[start:end] != self._data[start:end]
        return changed

    def changed(self) -> set[str]:
        """The variables that have another value than at first."""
        return {name for name in self._variables if self._changed(name).any()}

    def left(self) -> bool:
        """Whether a variable has another value than at first."""
        return any(self._changed(name).any() for name in self._variables)

    def restore(self, changed_state: int = LEFT) -> None:
        """Give all allocations what they held but for the variables, whose changed bytes get the state given."""
        memory = self._memory
        changed = {name: self._changed(name) for name in self._variables}
        values = {name: memory.bytes_of(name).copy() for name in self._variables}
        memory.data[:], memory.state[:] = self._data, self._state
        for name in self._variables:
            memory.bytes_of(name)[:] = values[name]
            memory.states_of(name)[changed[name]] = changed_state


def in_spite_of(run: Callable[[Garbage], GridResult]) -> GridResult | None:
    """What a kernel leaves that reads what nothing has written, if it does not depend on it; else None.

    Some kernels read ahead like this and use none of it, as CUB's merge does, or copy the padding of a structure. What
    a kernel looks for may also be what it left there itself, which is the last thing that it finds here.
    """
    kinds = [Garbage(fill) for fill in _FILLS]
    try:
        first, *others = [run(garbage) for garbage in (*kinds, Garbage(0, kinds[0].left))]
    except KernelFaultError:
        return None
    return first if all(_same(first, other) for other in others) else None


def in_spite_of_races(run: Callable[[Spare], GridResult], fault: KernelFaultError) -> GridResult | None:
    """What a kernel leaves whose data race is one of loads that do not matter (``machine.spare``); else None."""
    spare, found = Spare(), fault
    while found.read is not None and spare.add(found.read):
        try:
            first = run(spare)
        except KernelFaultError as e:
            found = e
            continue
        others = []
        try:
            for fill in _FILLS:
                spare.disturb(fill)
                others.append(run(spare))
        except KernelFaultError:
            return None
        return first if all(_same(first, other) for other in others) else None
    return None


def _instructions(result: GridResult) -> Mapping[str, int]:
    """How often each was executed; but where threads sleep until others are ready that is a matter of who runs when."""
    found: Mapping[str, int] = result.counts.instructions
    return {} if "nanosleep" in found else found


def _same(a: GridResult, b: GridResult) -> bool:
    return (
        all(a.outputs[n].tobytes() == b.outputs[n].tobytes() for n in a.outputs)
        and (a.printed, a.input_writes, a.unwritten) == (b.printed, b.input_writes, b.unwritten)
        and _instructions(a) == _instructions(b)
        and len(a.later) == len(b.later)
        and all(map(_same, a.later, b.later))
    )

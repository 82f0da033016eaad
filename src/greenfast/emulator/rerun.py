"""Rerun launches: with other fill bytes for uninitialised memory, and with poisoned redundant loads."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from greenfast.emulator.machine.faults import KernelFaultError
from greenfast.emulator.machine.memory import LEFT, UNWRITTEN, Bytes, GlobalMemory
from greenfast.emulator.machine.redundant_loads import RedundantLoads
from greenfast.emulator.machine.state import ResidentBlocks
from greenfast.emulator.ptx.unsupported import InternalError, LimitError
from greenfast.emulator.result import GridResult
from greenfast.spec.errors import UnsupportedError

#: Bytes that are NaN and -1, 0, numbers that are neither (0.75 in float32), and large ones (8e37).
_FILLS = (0xFF, 0x00, 0x3F, 0x7E)
#: Further ones for kernels that take other branches for other bytes: small numbers of both signs.
_MORE_FILLS = (0x80, 0x01)
#: Instructions with an effect that other threads may notice.
_NOTICED = frozenset(
    {"st", "atom", "red", "bar", "barrier", "cp", "mbarrier", "wgmma", "call", "stmatrix", "tensormap"}
)


@dataclass
class UninitFill:
    """Contents of uninitialised memory: the byte ``fill``, or the recorded contents of shared and local memory.

    before, after: shared and local memory before and after the run, by launch and first of the resident blocks.
    outputs: contents of unwritten global memory, from an earlier run. memory: global memory after this run.
    """

    fill: int
    before: Mapping[tuple[int, int], tuple[Bytes, Bytes]] = field(default_factory=dict)
    after: dict[tuple[int, int], tuple[Bytes, Bytes]] = field(default_factory=dict)
    outputs: Bytes | None = None
    memory: Bytes | None = None

    def fill_outputs(self, memory: GlobalMemory) -> None:
        """Fill the unwritten bytes of global memory."""
        memory.poisoned = True
        unwritten = memory.state == UNWRITTEN
        memory.data[unwritten] = self.fill if self.outputs is None else self.outputs[unwritten]

    def begin(self, launch: int, machine: ResidentBlocks) -> None:
        """Fill the memory of blocks before they begin."""
        result = self.before.get((launch, int(machine.blocks[0])))
        for arena, data in zip((machine.shared, machine.local), result or (None, None), strict=True):
            arena.fill_unwritten(self.fill)
            if data is not None and data.shape == arena.data.shape:
                arena.data[:] = data

    def end(self, launch: int, machine: ResidentBlocks) -> None:
        """Save the memory of the first blocks."""
        self.after.setdefault((launch, int(machine.blocks[0])), (machine.shared.data, machine.local.data))


class MemorySnapshot:
    """The contents of memory before the first launch; ``variables``: allocations that persist across launches."""

    def __init__(self, memory: GlobalMemory, variables: Collection[str]) -> None:
        self._memory, self._variables = memory, variables
        self._data, self._state = memory.data.copy(), memory.state.copy()

    def _changed(self, name: str) -> NDArray[np.bool_]:
        start, end = self._memory.starts[name], self._memory.get_end(name)
        changed: NDArray[np.bool_] = self._memory.data[start:end] != self._data[start:end]
        return changed

    def changed(self) -> set[str]:
        """Return the variables that have another value than at first."""
        return {name for name in self._variables if self._changed(name).any()}

    def dirty(self) -> bool:
        """Return whether a variable has changed since the snapshot."""
        return any(self._changed(name).any() for name in self._variables)

    def restore(self, changed_state: int = LEFT) -> None:
        """Restore all allocations except the variables. Changed bytes of variables get the given state."""
        memory = self._memory
        changed = {name: self._changed(name) for name in self._variables}
        values = {name: memory.get_bytes(name).copy() for name in self._variables}
        memory.data[:], memory.state[:] = self._data, self._state
        for name in self._variables:
            memory.get_bytes(name)[:] = values[name]
            memory.get_states(name)[changed[name]] = changed_state


def rerun_with_fills(run: Callable[[UninitFill], GridResult]) -> GridResult | None:
    """Run the kernel once per fill pattern for uninitialised memory. Return the result if all runs agree, else None.

    Some kernels read uninitialised memory and ignore the values: CUB's merge reads ahead, others copy the padding of a
    structure. A kernel may also search for data of its own earlier run, so the last run starts with the memory of the
    first one.

    Threads with unused results may branch on such values. Then counts differ, and more fill patterns are tried. The
    number of threads that execute stores, barriers and the like must be equal in all runs.

    Raises InternalError, and UnsupportedError if no fill pattern avoids an unsupported instruction.
    """
    kinds = [UninitFill(fill) for fill in _FILLS]
    results: list[GridResult] = []
    try:
        for fill in kinds:
            results.append(run(fill))
        results.append(run(UninitFill(0, kinds[0].after, outputs=kinds[0].memory)))
        first, *others = results
        if not all(_instructions(first) == _instructions(other) for other in others):
            others += [run(UninitFill(fill)) for fill in _MORE_FILLS]
    except InternalError:
        raise
    except (KernelFaultError, LimitError):
        return None
    except UnsupportedError:
        if not results and all(_is_unsupported(run, fill) for fill in kinds[1:]):
            raise
        return None
    return first if all(_agree(first, other, _effects) for other in others) else None


def _is_unsupported(run: Callable[[UninitFill], GridResult], fill: UninitFill) -> bool:
    """Return whether a run ends at an unsupported instruction. Raises InternalError."""
    try:
        run(fill)
    except InternalError:
        raise
    except UnsupportedError as e:
        return not isinstance(e, LimitError)
    except KernelFaultError:
        return False
    return False


def accept_benign_race(run: Callable[[RedundantLoads], GridResult], fault: KernelFaultError) -> GridResult | None:
    """Rerun the kernel with poisoned redundant loads. Return the result if its data race is benign, else None."""
    loads, result = RedundantLoads(), fault
    while result.read is not None and loads.add(result.read):
        try:
            first = run(loads)
        except KernelFaultError as e:
            result = e
            continue
        for choose in (loads.choose_writers, loads.choose_lowest):
            choose()
            others = []
            try:
                for fill in _FILLS:
                    loads.fill = fill
                    others.append(run(loads))
            except InternalError:
                raise
            except (KernelFaultError, UnsupportedError):  # without the poison value it ran to its end
                continue
            if all(_agree(first, other) for other in others):
                return first
        return None
    return None


def _instructions(result: GridResult) -> Mapping[str, int]:
    """Return the instruction counts; none for kernels with nanosleep, because their counts depend on the order."""
    values: Mapping[str, int] = result.counts.instructions
    return {} if "nanosleep" in values else values


def _effects(result: GridResult) -> Mapping[str, int]:
    """Return how many threads executed each instruction that other threads may notice.

    Waits on an mbarrier are none: how often a thread polls depends on the order of threads.
    """
    counts = result.counts.threads.items()
    return {name: n for name, n in counts if name.partition(".")[0] in _NOTICED and "_wait" not in name}


def _agree(a: GridResult, b: GridResult, counts: Callable[[GridResult], Mapping[str, int]] = _instructions) -> bool:
    """Return whether two runs have the same results and the same ``counts``."""
    return (
        all(a.outputs[n].tobytes() == b.outputs[n].tobytes() for n in a.outputs)
        and (a.printed, a.input_writes, a.unwritten) == (b.printed, b.input_writes, b.unwritten)
        and counts(a) == counts(b)
        and len(a.later) == len(b.later)
        and all(_agree(one, other, counts) for one, other in zip(a.later, b.later, strict=True))
    )

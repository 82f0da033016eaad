"""The order of launches in a chain: which launch last read and wrote each byte, and early accesses that are illegal.

A launch with programmatic stream serialization may begin before its predecessor ends. Until griddepcontrol.wait it must
not access bytes that the predecessor writes, nor write bytes that the predecessor reads. ld.global.nc requires that
nothing is written during the kernel, so it must not read such bytes even after the wait: the compiler may move the load
before the wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from greenfast.emulator.machine.memory import GlobalMemory
from greenfast.emulator.ptx.syntax import Instruction

Offsets = NDArray[np.int64]


class LaunchOrder:
    """The launches of a chain. Of each byte of global memory: which launch wrote and which read it last, from 1."""

    def __init__(self, memory: GlobalMemory, names: Sequence[str]) -> None:
        self.memory, self.names = memory, names
        number = np.min_scalar_type(len(names))
        self.wrote = np.zeros(len(memory.data), number)
        self.read = np.zeros(len(memory.data), number)
        self.number = 0
        #: The first launch that may still run while this one does.
        self.first = 0
        self.early = False

    def begin(self, number: int, early: bool) -> None:
        """Begin a launch, the first as number 0. The launches before an early one may still run."""
        self.number, self.early = number + 1, early and number > 0
        if not self.early:
            self.first = self.number

    def record(
        self, offsets: Offsets, size: int, writes: bool, waited: NDArray[np.bool_], by: Instruction
    ) -> tuple[int, str] | None:
        """Record an access; ``waited``: the threads that are past a griddepcontrol.wait.

        Return the first element that an early launch must not touch yet, and the reason.
        """
        violation = self.harm(offsets, size, writes, waited, by) if self.early else None
        if violation is None:
            self.touch(offsets, size, writes)
        return violation

    def touch(self, offsets: Offsets, size: int, writes: bool) -> None:
        """Note an access to ``size`` bytes each."""
        to = self.wrote if writes else self.read
        to[offsets[:, None] + np.arange(size)] = self.number

    def harm(
        self, offsets: Offsets, size: int, writes: bool, waited: NDArray[np.bool_], by: Instruction
    ) -> tuple[int, str] | None:
        """Return the first element that an early launch must not touch yet, and why; ``waited``: after their wait."""
        movable = by.name == "ld" and "nc" in by.parts
        result = self.conflict(offsets, size, writes, waited & (not movable))
        if result is None:
            return None
        row, other = result
        access = f"{'a write' if writes else 'a read'} of {self.memory.describe(int(offsets[row]))}, which {other},"
        why = "with no griddepcontrol.wait before it"
        if waited[row]:
            why = "by ld.global.nc, which the compiler may move over the griddepcontrol.wait before it"
        return row, f"{access} in a launch that may begin early, {why}"

    def conflict(self, offsets: Offsets, size: int, writes: bool, waited: Any) -> tuple[int, str] | None:
        """Return the first access that is not ordered after an earlier launch, and the conflict in words.

        waited: which accesses follow a griddepcontrol.wait.
        """
        places = offsets[:, None] + np.arange(size)
        result = self._unfinished(self.wrote[places])
        access = "writes"
        if writes and not result.any():
            result, access = self._unfinished(self.read[places]), "reads"
        bad = result.any(axis=1) & ~waited
        if not bad.any():
            return None
        row = int(np.flatnonzero(bad)[0])
        launch = int(result[row].max())
        return row, f"launch {launch} ({self.names[launch - 1]}) {access}"

    def _unfinished(self, launches: NDArray[Any]) -> NDArray[Any]:
        """Return the numbers of launches that may still run, 0 for others."""
        return np.where((launches >= self.first) & (launches < self.number), launches, launches.dtype.type(0))

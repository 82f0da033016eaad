"""Counts per phase of an instrumented build (kernels/common/phase_clock.cuh)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from greenfast.emulator.machine.blocks import ThreadSet, Values
from greenfast.emulator.machine.counts import Counts
from greenfast.emulator.ptx.syntax import CLOCKS, Function, Instruction, Special
from greenfast.spec.errors import UsageError
from greenfast.spec.problem import Array

#: Name of the counts before the first mark and after the last mark of a warp.
OUTSIDE = "outside"
_MOST_READS = 63  # bits of a sum that is signed


class PhaseCounts:
    """Counts per clock read: work of a warp is assigned to its next read of the clock.

    PTX does not name the phase that a read ends, but the kernel's sums do. The emulated clock of a thread gains a
    unique bit when the thread first reaches each read, and does not advance otherwise. So the bits in the sum of a
    phase name the reads that end it. Threads of a diverged warp share the counts of the warp.
    """

    def __init__(self, function: Function) -> None:
        """Raise UsageError for a kernel without clock reads, or with more of them than a sum has bits."""
        reads = [i for i in function.code if any(isinstance(o, Special) and o.name in CLOCKS for o in i.operands)]
        if not 0 < len(reads) <= _MOST_READS:
            raise UsageError(
                f"{function.name} reads the clock in {len(reads)} places; phases can be counted with 1 to {_MOST_READS}"
            )
        self._bits = {id(i): n for n, i in enumerate(reads)}
        self._ended = [Counts() for _ in reads]
        self._outside = Counts()
        self._since: dict[int, Counts] = {}
        self._clocks = np.zeros(0, np.uint64)
        self._warp = 0

    def begin(self, threads: int) -> None:
        """Begin some blocks, of as many threads together."""
        self._since = {}
        self._clocks = np.zeros(threads, np.uint64)

    def select_warp(self, warp: int) -> Counts:
        """Select the running warp. Return its counts over all blocks since its last clock read."""
        self._warp = warp
        return self._since.setdefault(warp, Counts())

    def read(self, instruction: Instruction, lanes: ThreadSet) -> tuple[Values, Counts]:
        """Return the clock as these threads of the running warp read it, and where its counts go from now on."""
        bit = self._bits[id(instruction)]
        self._ended[bit].add(self._since.pop(self._warp))
        self._clocks[lanes] |= np.uint64(1 << bit)
        return self._clocks[lanes], self.select_warp(self._warp)

    def end(self) -> None:
        """End the blocks that began last."""
        for counts in self._since.values():
            self._outside.add(counts)

    def by_phase(self, names: Sequence[str], sums: Array) -> dict[str, Counts]:
        """Return the counts of each phase and of the code outside of all phases.

        sums: int64 (blocks, phases), as the kernel wrote them. Raises UsageError if one clock read ends several phases.
        """
        masks = np.bitwise_or.reduce(sums.astype(np.int64), axis=0)
        result = {name: Counts() for name in (*names, OUTSIDE)}
        for bit, counts in enumerate(self._ended):
            ends = [name for name, mask in zip(names, masks, strict=True) if int(mask) >> bit & 1]
            if len(ends) > 1:
                raise UsageError(f"one mark of the clock ends several phases: {', '.join(ends)}")
            result[ends[0] if ends else OUTSIDE].add(counts)
        result[OUTSIDE].add(self._outside)
        return result

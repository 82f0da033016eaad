"""Counts per phase of an instrumented build (kernels/common/phase_clock.cuh)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from greenfast.emulator.machine.blocks import ThreadSet, Values
from greenfast.emulator.machine.counts import Counts
from greenfast.emulator.ptx.syntax import CLOCKS, Function, Instruction, Special
from greenfast.spec.errors import UsageError
from greenfast.spec.problem import Array

#: What a warp executes before its first mark's clock starts and after its last mark.
OUTSIDE = "outside"
_MOST_READS = 63  # bits of a sum that is signed


class PhaseCounts:
    """Counts by the read of the clock that the counted warp came to next.

    The PTX does not say which phase a read ends, but the kernel's own sums do. Here a thread's clock gains a unique
    bit the first time that the thread comes to each read, and nothing else advances it: so the bits in the sum of a
    phase name the reads that end it. Threads of a warp that diverge share what the warp has counted since.
    """

    def __init__(self, function: Function) -> None:
        """Raises UsageError for a kernel that reads no clock, or in more places than a sum has bits."""
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
        """What the warp of that number has executed since it last read the clock, in all blocks; it runs now."""
        self._warp = warp
        return self._since.setdefault(warp, Counts())

    def read(self, instruction: Instruction, lanes: ThreadSet) -> tuple[Values, Counts]:
        """The clock as these threads of the running warp read it, and where its counts go from now on."""
        bit = self._bits[id(instruction)]
        self._ended[bit].add(self._since.pop(self._warp))
        self._clocks[lanes] |= np.uint64(1 << bit)
        return self._clocks[lanes], self.select_warp(self._warp)

    def end(self) -> None:
        """End the blocks that began last."""
        for counts in self._since.values():
            self._outside.add(counts)

    def by_phase(self, names: Sequence[str], sums: Array) -> dict[str, Counts]:
        """The counts of each phase, and of what lies outside of all.

        sums: int64 (blocks, phases), as the kernel wrote them.
        Raises UsageError where a read of the clock ends several phases.
        """
        masks = np.bitwise_or.reduce(sums.astype(np.int64), axis=0)
        found = {name: Counts() for name in (*names, OUTSIDE)}
        for bit, counts in enumerate(self._ended):
            ends = [name for name, mask in zip(names, masks, strict=True) if int(mask) >> bit & 1]
            if len(ends) > 1:
                raise UsageError(f"one mark of the clock ends several phases: {', '.join(ends)}")
            found[ends[0] if ends else OUTSIDE].add(counts)
        found[OUTSIDE].add(self._outside)
        return found

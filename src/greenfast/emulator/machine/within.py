"""Which threads of one warp have synchronized since an access, as threads of a warp do not run in step (from sm_70 on).

Two accesses of different threads of a warp are ordered where both threads have taken part in something that
synchronizes since the first: a barrier, __syncwarp, any other instruction of a whole warp (shuffles, votes, matrix
fragments), a wait for an mbarrier, an atomic or volatile access. That is more lenient than the memory model: it
need not be the same barrier. In the same way a block must wait for something between the last access of another
block of its cluster to its shared memory and its end. Threads of two blocks of a cluster are ordered in shared memory
where the first has arrived at something since its access, and the second has waited since.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from greenfast.emulator.machine.faults import KernelFaultError
    from greenfast.emulator.machine.state import Lanes, Machine
    from greenfast.emulator.ptx.syntax import Instruction

#: Of a thread that has ended.
_ENDED = np.iinfo(np.int64).max


class Within:
    """The last synchronization of every thread, as the number of the latest access before it."""

    def __init__(self, machine: Machine) -> None:
        self.m = machine
        self.synced = np.zeros(machine.lanes, np.int64)
        #: Whether a block has no others in its cluster.
        self.alone = machine.geometry.cluster_size == 1
        #: In a cluster the same, and where a thread arrived and did not wait.
        self._released = self.synced if self.alone else self.synced.copy()
        self._least: dict[int, int] = {}
        # Accesses to other blocks' shared memory are counted; of each thread, how many there were when it synchronized.
        self._outside = 0
        self._outside_before = np.zeros(machine.lanes, np.int64)
        #: By position of a block: the last access of another one to its shared memory, its thread and instruction.
        self._from_outside: dict[int, tuple[int, int, Instruction]] = {}

    def reach_out(self, blocks: NDArray[np.intp], lanes: NDArray[np.intp]) -> None:
        """Threads access the shared memory of blocks, possibly of other blocks than theirs."""
        m = self.m
        self._outside += 1
        for n in np.flatnonzero(blocks != m.block_of[lanes]).tolist():
            block = int(blocks[n])
            self._from_outside[block] = self._outside, int(lanes[n]), m.current

    def _ended(self, block: int) -> KernelFaultError:
        _, lane, self.m.current = self._from_outside[block]
        name = self.m.block_name(int(self.m.blocks[block]))
        what = f"shared memory of {name}, which has ended or may have: it waits for nothing after this access"
        return self.m.fault(what, lane)

    def converge(self, lanes: Lanes, now: int) -> None:
        """Threads synchronize."""
        self.synced[lanes] = self._released[lanes] = now
        self._outside_before[lanes] = self._outside
        self._least.clear()

    def let_go(self, lanes: Lanes, now: int) -> None:
        """Threads arrive at an mbarrier or at a cluster's barrier."""
        if not self.alone:
            self._released[lanes] = now

    def abroad(self, blocks: NDArray[Any], mine: NDArray[Any], others: NDArray[Any]) -> NDArray[np.bool_]:
        """Whether one of two threads (-1: of none) accesses another block's shared memory; blocks: whose it is."""
        found: NDArray[np.bool_] = (self.m.block_of[mine] != blocks) | (self.m.block_of[others] != blocks)
        return found & (others >= 0)

    def end(self, lanes: Lanes) -> None:
        """Threads end: what they did is complete for threads that synchronize from now on.

        Raises KernelFaultError where a block has ended whose shared memory another one still accessed.
        """
        for block, (number, _, _) in self._from_outside.items():
            mine = self.m.block_of == block
            if self.m.ended[mine].all() and self._outside_before[mine].max() < number:
                raise self._ended(block)
        self.synced[lanes] = self._released[lanes] = _ENDED
        self._least.clear()

    def least(self, warp: int) -> int:
        """Up to which access all threads of a warp, in every block, have synchronized."""
        found = self._least.get(warp)
        if found is None:
            size = self.m.set_size
            found = self._least[warp] = int(self.synced[warp * size : (warp + 1) * size].min())
        return found

    def apart(self, numbers: NDArray[Any], mine: NDArray[Any], others: NDArray[Any]) -> NDArray[np.bool_]:
        """Which accesses of other threads of a warp (-1: of none) this one's threads have not synchronized with."""
        theirs = self.synced[others]
        if not self.alone:
            theirs = np.where(self.m.block_of[mine] == self.m.block_of[others], theirs, self._released[others])
        known = np.minimum(self.synced[mine], theirs)
        found: NDArray[np.bool_] = (others >= 0) & (mine >= 0) & (others != mine) & (known < numbers)
        return found

"""Happens-before between the threads of one warp, as threads of a warp do not run in step (from sm_70 on).

An access of thread a is ordered before one of thread b of the same warp if b has learned of it: through a barrier of
the block, a bar.warp.sync whose membermask names both, an mbarrier, or a place in memory that a wrote after a fence and
b read (atomic, volatile, relaxed, acquire). Shuffles, votes, matrix fragments and the other instructions of a warp
wait for its threads and order no memory (CUDA C++ Programming Guide: "these intrinsics do not imply a memory barrier").
What such an instruction reads or writes itself comes after what the warp's threads did before it.

A block must wait for something between the last access of another block of its cluster to its shared memory and its
end. Threads of two blocks of a cluster are ordered in shared memory where the first has arrived at something since its
access, and the second has waited since: that is more lenient than the memory model, as it need not be the same barrier.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from greenfast.emulator.machine.blocks import WARP, BlockState, ThreadSet
from greenfast.emulator.machine.faults import KernelFaultError
from greenfast.emulator.ptx.syntax import Instruction

#: Of a thread that has ended.
_ENDED = np.iinfo(np.int64).max


class WarpSync:
    """What every thread knows of the other threads of its warp, as numbers of accesses."""

    def __init__(self, machine: BlockState) -> None:
        self.m = machine
        #: Up to which access a thread knows all accesses of its warp.
        self.clock = np.where(machine.exists, 0, _ENDED)
        #: (threads, 32) up to which access it knows those of each lane of its warp, beyond ``whole``; None: no more.
        self.by_lane: NDArray[np.int64] | None = None
        #: Whether an instruction runs that has waited for all threads of the warp.
        self.collective = False
        #: In a cluster: the last access before a thread last waited for anything.
        self.synced = np.zeros(machine.lanes, np.int64)
        #: Whether a block has no others in its cluster.
        self.is_single_block = machine.geometry.cluster_size == 1
        #: In a cluster the same, and where a thread arrived and did not wait.
        self._released = self.synced if self.is_single_block else self.synced.copy()
        self._min_clocks: dict[int, int] = {}
        # Accesses to other blocks' shared memory are counted; of each thread, how many there were when it synchronized.
        self._remote_count = 0
        self._remote_count_at_sync = np.zeros(machine.lanes, np.int64)
        #: By position of a block: the last access of another one to its shared memory, its thread and instruction.
        self._last_remote: dict[int, tuple[int, int, Instruction]] = {}

    def record_remote_access(self, blocks: NDArray[np.intp], lanes: NDArray[np.intp]) -> None:
        """Threads access the shared memory of blocks, possibly of other blocks than theirs."""
        m = self.m
        self._remote_count += 1
        for n in np.flatnonzero(blocks != m.block_of[lanes]).tolist():
            block = int(blocks[n])
            self._last_remote[block] = self._remote_count, int(lanes[n]), m.current

    def _ended(self, block: int) -> KernelFaultError:
        _, lane, self.m.current = self._last_remote[block]
        name = self.m.block_name(int(self.m.blocks[block]))
        what = f"shared memory of {name}, which has ended or may have: it waits for nothing after this access"
        return self.m.fault(what, lane)

    def join_all(self, lanes: ThreadSet, until: Any) -> None:
        """Let threads know all accesses of their warps up to ``until``, a number or one for each thread."""
        self.clock[lanes] = np.maximum(self.clock[lanes], until)
        self._min_clocks.clear()

    def clocks(self, lanes: NDArray[np.intp]) -> NDArray[np.int64]:
        """Return (threads, 32): up to which access each thread knows those of the lanes of its warp."""
        whole = self.clock[lanes][:, None]
        return np.maximum(whole, self._table()[lanes])

    def join(self, lanes: NDArray[np.intp], known: NDArray[np.int64]) -> None:
        """Let threads know accesses of the lanes of their warps; known: (32,) or (threads, 32) numbers."""
        table = self._table()
        table[lanes] = np.maximum(table[lanes], known)

    def _table(self) -> NDArray[np.int64]:
        if self.by_lane is None:
            self.by_lane = np.zeros((self.m.lanes, WARP), np.int64)
        return self.by_lane

    def mark_collective(self, threads: NDArray[Any]) -> NDArray[Any]:
        """Return how the accesses of an instruction of a whole warp are recorded: as another thread's for each one."""
        return np.where(threads >= 0, threads + self.m.lanes, threads)

    def sync_groups(self, lanes: NDArray[np.intp], now: int) -> None:
        """Synchronize threads, those of each warp with one another."""
        warps = lanes // WARP
        living = np.count_nonzero(~self.m.ended.reshape(-1, WARP), axis=1)
        complete = (np.bincount(warps, minlength=len(living)) == living)[warps]
        self.join_all(lanes[complete], now)
        for warp in np.unique(warps[~complete]):
            group = lanes[warps == warp]
            known = self.clocks(group).max(axis=0)
            known[group % WARP] = now
            self.join(group, known)
        self.wait(lanes, now)

    def wait(self, lanes: ThreadSet, now: int) -> None:
        """Threads of a cluster's block have waited for something."""
        self.synced[lanes] = self._released[lanes] = now
        self._remote_count_at_sync[lanes] = self._remote_count

    def arrive(self, lanes: ThreadSet, now: int) -> None:
        """Threads arrive at an mbarrier or at a cluster's barrier."""
        if not self.is_single_block:
            self._released[lanes] = now

    def is_remote(self, blocks: NDArray[Any], mine: NDArray[Any], others: NDArray[Any]) -> NDArray[np.bool_]:
        """Whether one of two threads (-1: of none) accesses another block's shared memory; blocks: whose it is."""
        theirs = self.m.block_of[others % self.m.lanes]
        found: NDArray[np.bool_] = (self.m.block_of[mine] != blocks) | (theirs != blocks)
        return found & (others >= 0)

    def end(self, lanes: ThreadSet) -> None:
        """Threads end: what they did is complete for threads that synchronize from now on.

        Raises KernelFaultError where a block has ended whose shared memory another one still accessed.
        """
        for block, (number, _, _) in self._last_remote.items():
            mine = self.m.block_of == block
            if self.m.ended[mine].all() and self._remote_count_at_sync[mine].max() < number:
                raise self._ended(block)
        self.synced[lanes] = self._released[lanes] = self.clock[lanes] = _ENDED
        self._min_clocks.clear()

    def min_clock(self, warp: int) -> int:
        """Return up to which access all threads of a warp, in every block, know the warp's accesses."""
        if self.collective:
            return _ENDED
        known = self._min_clocks.get(warp)
        if known is None:
            size = self.m.threads_per_warp_slot
            known = self._min_clocks[warp] = int(self.clock[warp * size : (warp + 1) * size].min())
        return known

    def unordered(self, numbers: NDArray[Any], mine: NDArray[Any], others: NDArray[Any]) -> NDArray[np.bool_]:
        """Return which accesses of other threads of a warp (-1: of none) nothing orders before one of this thread."""
        foreign = others != mine
        others = np.where(others >= 0, others % self.m.lanes, others)
        known = self.clock[mine]
        if self.by_lane is not None:
            known = np.maximum(known, self.by_lane[mine, others % WARP])
        if not self.is_single_block:
            remote = self.m.block_of[mine] != self.m.block_of[others]
            known = np.where(remote, np.minimum(self.synced[mine], self._released[others]), known)
        unordered: NDArray[np.bool_] = (others >= 0) & (mine >= 0) & foreign & (known < numbers)
        return unordered

"""Happens-before between the threads of one warp under independent thread scheduling (sm_70 and newer).

An access of thread a is ordered before an access of thread b of its warp if b synchronized with a after it.
Synchronization is: a barrier of the block, a bar.warp.sync with a membermask of both threads, an mbarrier, or a word
that a wrote after a fence and b read (atomic, volatile, relaxed, acquire). Shuffles, votes, matrix fragments and other
warp instructions wait for the threads of the warp but order no memory (CUDA C++ Programming Guide: "these intrinsics do
not imply a memory barrier"). Accesses by such an instruction itself are ordered after earlier accesses of the warp's
threads.

A block must wait for a barrier between the last access to its shared memory by another block of the cluster and its own
end. Between two blocks of a cluster, accesses to shared memory are ordered if the first thread has arrived at a barrier
after its access, the second thread has waited since, and the second block knows the first one's access by a barrier of
the cluster, an mbarrier or memory. This is more lenient than the memory model, because the barriers may differ.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from greenfast.emulator.machine.blocks import WARP, BlockState, ThreadSet
from greenfast.emulator.machine.faults import KernelFaultError
from greenfast.emulator.machine.ordering import Ordering
from greenfast.emulator.ptx.syntax import Instruction

#: Clock of a thread that has ended.
_ENDED = np.iinfo(np.int64).max


class WarpSync:
    """The clock of each thread for the other threads of its warp, as access numbers."""

    def __init__(self, machine: BlockState, ordering: Ordering) -> None:
        self.m, self.ordering = machine, ordering
        #: Per thread: all accesses of its warp up to this number are ordered before its next access.
        self.clock = np.where(machine.exists, 0, _ENDED)
        #: (threads, 32), per lane of the warp: the same number if it exceeds ``clock``. None: no lane exceeds it.
        self.by_lane: NDArray[np.int64] | None = None
        #: Per thread that has ended: its clock before that.
        self._final = np.zeros(machine.lanes, np.int64)
        #: Per thread: its last access up to its last instruction on matrices.
        self.converged = np.zeros(machine.lanes, np.int64)
        #: True while an instruction runs that has waited for all threads of the warp.
        self.collective = False
        #: In a cluster: the last access before the last wait of each thread.
        self.synced = np.zeros(machine.lanes, np.int64)
        #: True if each cluster has one block.
        self.is_single_block = machine.geometry.cluster_size == 1
        #: In a cluster: the last access before the last wait or arrival of each thread.
        self._released = self.synced if self.is_single_block else self.synced.copy()
        self._min_clocks: dict[int, int] = {}
        # The number of accesses to other blocks' shared memory: now, and at each thread's last synchronization.
        self._remote_count = 0
        self._remote_count_at_sync = np.zeros(machine.lanes, np.int64)
        #: Per block position: the last access to its shared memory by another block, with its thread and instruction.
        self._last_remote: dict[int, tuple[int, int, Instruction]] = {}

    def record_remote_access(self, blocks: NDArray[np.intp], lanes: NDArray[np.intp]) -> None:
        """Record accesses to the shared memory of blocks, possibly of other blocks than the threads' own."""
        m = self.m
        self._remote_count += 1
        for n in np.flatnonzero(blocks != m.block_of[lanes]).tolist():
            block = int(blocks[n])
            self._last_remote[block] = self._remote_count, int(lanes[n]), m.current

    def _ended(self, block: int) -> KernelFaultError:
        _, lane, self.m.current = self._last_remote[block]
        name = self.m.block_name(int(self.m.blocks[block]))
        reason = f"shared memory of {name}, which has ended or may have: it waits for nothing after this access"
        return self.m.fault(reason, lane)

    def join_all(self, lanes: ThreadSet, until: Any) -> None:
        """Order all accesses of their warps up to ``until`` before the threads; until: a number, or one per thread."""
        self.clock[lanes] = np.maximum(self.clock[lanes], until)
        self._min_clocks.clear()

    def clocks(self, lanes: NDArray[np.intp]) -> NDArray[np.int64]:
        """Return (threads, 32): the clock of each thread for each lane of its warp."""
        whole = self.clock[lanes][:, None]
        return np.maximum(whole, self._table()[lanes])

    def arriving_clocks(self, lanes: NDArray[np.intp], now: int, latest: int) -> NDArray[np.int64] | None:
        """Return (32,) the accesses of a warp's lanes that an arrival of some of its threads passes on; None: all.

        latest: the last access of the warp. Threads that have not synchronized with the arriving ones may be late:
        their accesses are not passed on. An instruction on matrices counts as synchronization, because all threads
        execute it together; kernels release a stage of shared memory by one thread of a warp after it.
        """
        whole = lanes[0] // WARP * WARP + np.arange(WARP)
        exists = self.m.exists[whole]
        if len(lanes) == np.count_nonzero(exists):
            return None
        clock = np.where(self.m.ended[lanes], self._final[lanes], self.clock[lanes])[:, None]
        known = np.maximum(np.maximum(clock, self._table()[lanes]).max(axis=0), self.converged[whole])
        known[~exists] = known[lanes % WARP] = now
        return None if known.min() >= latest else known

    def join(self, lanes: NDArray[np.intp], known: NDArray[np.int64]) -> None:
        """Order accesses by lanes of their warps before the threads; known: (32,) or (threads, 32) access numbers."""
        table = self._table()
        table[lanes] = np.maximum(table[lanes], known)

    def _table(self) -> NDArray[np.int64]:
        if self.by_lane is None:
            self.by_lane = np.zeros((self.m.lanes, WARP), np.int64)
        return self.by_lane

    def mark_collective(self, threads: NDArray[Any]) -> NDArray[Any]:
        """Return thread numbers plus ``m.lanes`` (-1: unchanged), to record accesses by an instruction of a whole warp.

        They then count as another thread's accesses, even for the thread itself.
        """
        return np.where(threads >= 0, threads + self.m.lanes, threads)

    def sync_groups(self, lanes: NDArray[np.intp], now: int) -> None:
        """Synchronize the threads of each warp with one another."""
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
        """Record that threads have waited for a barrier."""
        self.synced[lanes] = self._released[lanes] = now
        self._remote_count_at_sync[lanes] = self._remote_count

    def arrive(self, lanes: ThreadSet, now: int) -> None:
        """Record an arrival at an mbarrier or a cluster barrier."""
        if not self.is_single_block:
            self._released[lanes] = now

    def is_remote(self, blocks: NDArray[Any], mine: NDArray[Any], others: NDArray[Any]) -> NDArray[np.bool_]:
        """Return whether one of two threads (-1: no thread) accesses the shared memory of another block."""
        theirs = self.m.block_of[others % self.m.lanes]
        result: NDArray[np.bool_] = (self.m.block_of[mine] != blocks) | (theirs != blocks)
        return result & (others >= 0)

    def end(self, lanes: ThreadSet) -> None:
        """End threads: their accesses are ordered before all threads that synchronize from now on.

        Raises KernelFaultError if another block still accessed the shared memory of a block that has ended.
        """
        for block, (number, _, _) in self._last_remote.items():
            mine = self.m.block_of == block
            if self.m.ended[mine].all() and self._remote_count_at_sync[mine].max() < number:
                raise self._ended(block)
        self._final[lanes] = self.clock[lanes]
        self.synced[lanes] = self._released[lanes] = self.clock[lanes] = _ENDED
        self._min_clocks.clear()

    def min_clock(self, warp: int) -> int:
        """Return the minimum clock of all threads of a warp, over all blocks; 0 in clusters of several blocks."""
        if self.collective:
            return _ENDED
        if not self.is_single_block:
            return 0
        known = self._min_clocks.get(warp)
        if known is None:
            size = self.m.threads_per_warp_slot
            known = self._min_clocks[warp] = int(self.clock[warp * size : (warp + 1) * size].min())
        return known

    def unordered(self, numbers: NDArray[Any], mine: NDArray[Any], others: NDArray[Any]) -> NDArray[np.bool_]:
        """Return a mask of the accesses that are not ordered before the current ones.

        numbers, others: access numbers and their threads (-1: no access). mine: the threads of the current accesses.
        """
        foreign = others != mine
        others = np.where(others >= 0, others % self.m.lanes, others)
        known = self.clock[mine]
        if self.by_lane is not None:
            known = np.maximum(known, self.by_lane[mine, others % WARP])
        if not self.is_single_block:
            remote = self.m.block_of[mine] != self.m.block_of[others]
            between = self.ordering.blocks[self.m.block_of[mine], self.m.block_of[others]]
            known = np.where(remote, np.minimum(between, np.minimum(self.synced[mine], self._released[others])), known)
        unordered: NDArray[np.bool_] = (others >= 0) & (mine >= 0) & foreign & (known < numbers)
        return unordered

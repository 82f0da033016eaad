"""Accesses that may be data races, for warps that run in lockstep.

An epoch ends at each barrier and each ``bar.warp.sync``. Two accesses of different threads to one place, at least one a
write, are ordered if a barrier of the block (or a ``bar.warp.sync``, for threads of one warp) is between them. Each
other pair ends the run by RestartWarpByWarp. Races (races.py) then decides whether it is a race, because this check is
stricter: it does not compare values, and an access by several threads of a warp is nobody's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from greenfast.emulator.machine.access_log import GlobalRecord, RestartWithReadTracking
from greenfast.emulator.machine.blocks import WARP, BlockState, ThreadSet
from greenfast.emulator.machine.ordering import Ordering
from greenfast.emulator.machine.races import Races
from greenfast.emulator.ptx.syntax import Instruction

Numbers = NDArray[Any]
#: A tag is (block of the grid + 1) << 37 | epoch << 12 | flags | thread of its block; 0 for no access.
EPOCH_SHIFT = 12
_BLOCK, _EPOCH = np.uint64(37), np.uint64(EPOCH_SHIFT)
#: Flags: several threads of a warp, threads of several warps. In place of a block: several blocks.
SEVERAL, SEVERAL_WARPS, BLOCK_BITS = np.uint64(1 << 10), np.uint64(1 << 11), np.uint64((1 << 64) - (1 << 37))
#: The bits that two tags of one thread, and of one warp, have in common.
THREAD_BITS = np.uint64((1 << 12) - 1)
WARP_BITS = THREAD_BITS & ~np.uint64(WARP - 1) & ~SEVERAL
_NO_TAG, _ONE_BLOCK = np.uint64(0), np.uint64(1) << _BLOCK
#: Reads that are collected before they are recorded.
_MOST_READS = 256


#: How loads and stores are compiled: not at all; shared memory's reads recorded as spans; or by thread.
INTERPRETED, SPANS, TAGS = "interpreted", "spans", "tags"


class RestartWarpByWarp(Exception):  # noqa: N818 - no error: the run begins again
    """Request to run the grid again warp by warp: in lockstep something may be a fault."""


class RestartCompiled(Exception):  # noqa: N818 - no error: the run begins again
    """Request to run the grid again with loads and stores compiled another way (compiled/stretches.py)."""

    def __init__(self, mode: str) -> None:
        super().__init__(mode)
        self.mode = mode


class _Tags:
    """The tag of the last access to each unit of a memory; latest: the epoch of the last access to any."""

    def __init__(self, size: int, unit: int) -> None:
        self.unit, self.latest = unit, 0
        self.table = np.zeros(-(-size // unit), np.uint64)

    def _table(self, size: int) -> Numbers:
        """Return the tags as a table with a row for each element of ``size`` bytes."""
        if size < self.unit:
            raise RestartWarpByWarp
        return self.table if size == self.unit else self.table.reshape(-1, size // self.unit)

    def get(self, offsets: Numbers, size: int) -> Numbers:
        """Return (elements,) tags, or (elements, units)."""
        tags: Numbers = self._table(size)[offsets // size]
        return tags

    def put(self, offsets: Numbers, size: int, tags: Numbers) -> None:
        """Set tags as ``get`` returns them."""
        self._table(size)[offsets // size] = tags


class EpochLog:
    """The last writes and reads of each unit of a memory; unit: the bytes of the program's smallest access there."""

    def __init__(self, size: int, unit: int) -> None:
        self.unit, self.writes, self.reads = unit, _Tags(size, unit), _Tags(size, unit)


@dataclass
class _Read:
    """A read of shared memory that is not recorded yet; span: its first and last offset in blocks, once computed."""

    offsets: Numbers
    size: int
    threads: ThreadSet
    epoch: np.uint64
    collective: bool
    span: tuple[int, int] | None = None


class EpochRaces(Races):
    """The accesses of a machine's threads that may be data races."""

    def __init__(self, machine: BlockState, record: GlobalRecord, ordering: Ordering, units: Mapping[str, int]) -> None:
        super().__init__(machine, record, ordering)
        self.shared_log = EpochLog(len(machine.shared.data), units["shared"])
        if record.epochs is None:
            record.epochs = EpochLog(len(machine.memory.data), units["global"])
        self.global_log = record.epochs
        self._reads: list[_Read] = []
        #: Per compiled load since the last barrier: its first and last byte, as offsets in blocks.
        self.read_spans: dict[object, Numbers] = {}
        #: Whether a write followed a read of the same span of shared memory, with no barrier between them.
        self.overlaps = False
        blocks = (machine.blocks[machine.block_of] + 1).astype(np.uint64) << _BLOCK
        self._own = blocks | machine.thread_of.astype(np.uint64)
        #: Per thread: the tag of its next access, and the lowest tags that its block and its warp may not be ordered
        #: after.
        self._next, self._block_floor, self._warp_floor = np.zeros((3, machine.lanes), np.uint64)
        #: The current epoch; the first epoch of each block after its last barrier; the lowest of all blocks.
        self.epoch, self._since, self.least = 0, np.zeros(len(machine.blocks), np.int64), 0
        self._begin_epoch()
        self._block_floor[:] = self._warp_floor[:] = blocks
        self._blocks = blocks

    def _begin_epoch(self) -> None:
        self.epoch += 1
        np.bitwise_or(self._own, np.uint64(self.epoch << EPOCH_SHIFT), out=self._next)

    # ---- synchronizing ----------------------------------------------------------------------------------------------

    def complete_barriers(self, keys: Numbers, waiting: Numbers, of: Numbers, per_block: int) -> None:
        """Complete barriers of whole blocks."""
        m = self.m
        self.pass_pdl_waits(waiting, of)
        self._begin_epoch()
        if len(waiting) == m.lanes - np.count_nonzero(m.ended):
            synced: Any = slice(None)
            self._reads.clear()
            self.read_spans.clear()
            self._since[:] = self.epoch
        else:
            blocks = np.zeros(len(m.blocks), np.bool_)
            blocks[keys // per_block] = True
            synced = blocks[m.block_of]
            if np.count_nonzero(synced & ~m.ended) != len(waiting):
                raise RestartWarpByWarp
            self._since[blocks] = self.epoch
        self.least = int(self._since.min())
        self._block_floor[synced] = self._warp_floor[synced] = (self._blocks | np.uint64(self.epoch << EPOCH_SHIFT))[
            synced
        ]

    def sync_warp(self, lanes: Numbers) -> None:
        """Synchronize the threads of whole warps. Partial groups are not noted: their accesses count as unordered."""
        warps = lanes // WARP
        living = np.count_nonzero(~self.m.ended.reshape(-1, WARP), axis=1)
        whole = lanes[(np.bincount(warps, minlength=len(living)) == living)[warps]]
        self._begin_epoch()
        self._warp_floor[whole] = self._blocks[whole] | np.uint64(self.epoch << EPOCH_SHIFT)

    def fence(self, lanes: ThreadSet, scope: int) -> None:
        """Execute a fence: without atomic, volatile, acquire and release accesses it orders nothing."""

    # ---- accesses ---------------------------------------------------------------------------------------------------

    def read_shared(self, offsets: Numbers, size: int) -> None:
        """Check a read of ``size`` bytes per thread, and keep it until a write follows in the same epoch."""
        threads = self._threads(len(offsets))
        if self.shared_log.writes.latest >= self.least:
            self._check(self.shared_log.writes.get(offsets, size), threads)
        self._reads.append(
            _Read(offsets, size, threads, np.uint64(self.epoch << EPOCH_SHIFT), self.warp_sync.collective)
        )
        if len(self._reads) > _MOST_READS:
            for read in self._reads:  # as reads of their whole blocks, to save time
                tags = self._blocks[read.threads] | (read.epoch | SEVERAL | SEVERAL_WARPS)
                self.shared_log.reads.put(read.offsets, read.size, _expand(tags, read.size // self.shared_log.unit))
            self.shared_log.reads.latest = self.epoch
            self._reads.clear()

    def write_shared(self, offsets: Numbers, size: int, values: Numbers | None) -> None:
        """Check and record a write of ``size`` bytes per thread."""
        threads = self._threads(len(offsets))
        if self.shared_log.writes.latest >= self.least:
            self._check(self.shared_log.writes.get(offsets, size), threads)
        self._record_shared_reads(offsets, size, threads)
        if self.shared_log.reads.latest >= self.least:
            self._check(self.shared_log.reads.get(offsets, size), threads)
        self._put_writes(self.shared_log.writes, offsets, size, threads)

    def record_finished(
        self, offsets: Numbers, size: int, lanes: Numbers, writes: bool, instruction: Instruction
    ) -> None:
        """Record writes to shared memory that threads began before and have waited for now."""
        self._put_writes(self.shared_log.writes, offsets, size, self._threads(len(offsets), lanes))

    def read_global(self, offsets: Numbers, size: int) -> None:
        """Check a read of ``size`` bytes per thread. Record it if the launch writes the buffer."""
        record, log = self.record, self.global_log
        self._check_launches(offsets, size, False)
        owners = record.memory.owners(offsets)
        if record.dirty.isdisjoint(owners) and record.tracked.isdisjoint(owners):
            record.read.update(owners)
            return
        threads = self._threads(len(offsets))
        before = log.writes.get(offsets, size)
        if "nc" in self.m.current.parts and before.any():
            raise RestartWarpByWarp
        self._check(before, threads)
        record.read.update(owners - record.tracked - record.dirty)
        read = _Read(offsets, size, threads, np.uint64(self.epoch << EPOCH_SHIFT), self.warp_sync.collective)
        self._put_reads(log.reads, read)

    def write_global(self, offsets: Numbers, size: int, values: Numbers | None) -> None:
        """Check and record a write of ``size`` bytes per thread."""
        record, log = self.record, self.global_log
        self._check_launches(offsets, size, True)
        owners = record.memory.owners(offsets)
        if owners & record.inputs:
            raise RestartWarpByWarp
        for owner in (owners & record.read) - record.tracked:
            raise RestartWithReadTracking(record.memory.get_name(owner))
        record.dirty |= owners
        threads = self._threads(len(offsets))
        self._check(log.writes.get(offsets, size), threads)
        if log.reads.latest:
            self._check(log.reads.get(offsets, size), threads)
        self._put_writes(log.writes, offsets, size, threads)

    @property
    def tags_by_thread(self) -> tuple[Numbers, Numbers, Numbers]:
        """Return by thread its own tag without an epoch, and the floors of its block and its warp."""
        return self._own, self._block_floor, self._warp_floor

    def record_collected_reads(self) -> None:
        """Record the collected reads of shared memory."""
        for read in self._reads:
            self._put_reads(self.shared_log.reads, read)
        self._reads.clear()

    def check_spans(self, first: int, last: int) -> None:
        """Restart if a compiled load may have read a byte of a write since the last barrier."""
        for low, high in self.read_spans.values():
            if low <= last and first <= high:
                raise RestartCompiled(TAGS)

    def _threads(self, count: int, lanes: ThreadSet | None = None) -> ThreadSet:
        """Return the thread of each element of an access, a slice if these are adjacent."""
        own = self.m.access_lanes if lanes is None else lanes
        return own if isinstance(own, slice) and own.stop - own.start == count else self.threads(count, lanes)

    def _check(self, before: Numbers, threads: ThreadSet) -> None:
        """Restart if an access with one of the tags ``before`` may not be ordered before one by these threads."""
        late = self._find_late(before, threads)
        if not late.any():
            return
        differs = before ^ _like(self._own[threads], before)
        late &= differs & (THREAD_BITS | BLOCK_BITS) != 0
        if late.any():
            ordered = differs & (WARP_BITS | BLOCK_BITS) == 0
            if not self.warp_sync.collective:
                ordered &= before < _like(self._warp_floor[threads], before)
            if (late & ~ordered).any():
                raise RestartWarpByWarp

    def _find_late(self, before: Numbers, threads: ThreadSet) -> NDArray[np.bool_]:
        """Return which of the tags ``before`` are of other blocks, or of this block since its last barrier."""
        floor = _like(self._block_floor[threads], before)
        late: NDArray[np.bool_] = before >= floor
        late |= ((before ^ floor) >= _ONE_BLOCK) & (before != 0)
        return late

    def _put_writes(self, table: _Tags, offsets: Numbers, size: int, threads: ThreadSet) -> None:
        """Record a write. Restart if several warps write one place in this instruction."""
        table.latest = self.epoch
        tags = self._next[threads]
        if self.warp_sync.collective:
            tags = tags | SEVERAL
        tags = _expand(tags, size // table.unit)
        table.put(offsets, size, tags)
        left = table.get(offsets, size)
        lost = left != tags
        if lost.any():
            if ((left ^ tags)[lost] & (WARP_BITS | BLOCK_BITS) != 0).any():
                raise RestartWarpByWarp
            some = lost.reshape(len(offsets), -1).any(axis=1)
            table.put(offsets[some], size, tags[some] | SEVERAL)

    def _record_shared_reads(self, offsets: Numbers, size: int, threads: ThreadSet) -> None:
        """Record the collected reads of shared memory that may be of the same places as a write."""
        if not self._reads and not self.read_spans:
            return
        first, last = self._find_span(offsets, size, threads)
        self.check_spans(first, last)
        kept = []
        for read in self._reads:
            if read.span is None:
                read.span = self._find_span(read.offsets, read.size, read.threads)
            if read.span[0] <= last and first <= read.span[1]:
                self._put_reads(self.shared_log.reads, read)
                self.overlaps = True
            else:
                kept.append(read)
        self._reads = kept

    def _find_span(self, offsets: Numbers, size: int, threads: ThreadSet) -> tuple[int, int]:
        """Return the first and the last byte of an access, as offsets in its threads' blocks."""
        own = offsets - self.m.shared_start[threads]
        return int(own.min()), int(own.max()) + size - 1

    def _put_reads(self, table: _Tags, read: _Read) -> None:
        """Record a read. A tag with several threads, warps or blocks replaces the tags of different readers."""
        offsets, size, threads, epoch = read.offsets, read.size, read.threads, read.epoch
        table.latest = max(table.latest, int(epoch >> _EPOCH))
        before = table.get(offsets, size)
        own = self._own[threads] | (epoch | SEVERAL if read.collective else epoch)
        tags = np.array(_expand(own, size // table.unit))
        late = self._find_late(before, threads)
        if late.any():
            differs = (before ^ tags)[late]
            tags[late] |= np.where(differs & THREAD_BITS != 0, SEVERAL, _NO_TAG)
            tags[late] |= np.where(differs & (WARP_BITS | BLOCK_BITS) != 0, SEVERAL | SEVERAL_WARPS, _NO_TAG)
            tags[late] |= np.where(differs & BLOCK_BITS != 0, BLOCK_BITS, _NO_TAG)
        table.put(offsets, size, tags)
        left = table.get(offsets, size)
        lost = left != tags
        if lost.any():  # several readers of one place in this instruction: the widest kind counts for all of them
            differs = np.bitwise_or.reduce((left ^ tags)[lost])
            flags = SEVERAL | (SEVERAL_WARPS if differs & (WARP_BITS | BLOCK_BITS) else _NO_TAG)
            flags |= BLOCK_BITS if differs & BLOCK_BITS else _NO_TAG
            some = lost.reshape(len(offsets), -1).any(axis=1)
            table.put(offsets[some], size, left[some] | flags)


def _like(tags: Numbers, other: Numbers) -> Numbers:
    """Return the tags of elements in a shape that fits (elements,) or (elements, units)."""
    return tags if other.ndim == 1 else tags[:, None]


def _expand(tags: Numbers, units: int) -> Numbers:
    """Repeat the tag of each element for its units."""
    return tags if units == 1 else np.repeat(tags[:, None], units, axis=1)

"""Data races: two unordered accesses to one byte by different threads, at least one a write, at least one not atomic.

For threads of one warp see warp_sync.py. Volatile, relaxed, acquire and release accesses count as atomic. A write that
leaves the value unchanged is no race. Neither is a read after the thread's own write in an instruction where other
threads of its warp wrote the same value. For each word, the last write is kept. In shared memory the last read of each
warp is kept as well. In global memory the last reads by two blocks are kept, for buffers that the launch writes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from greenfast.emulator.machine.access_log import (
    WORD,
    AccessTable,
    AccessTables,
    GlobalRecord,
    RestartWithReadTracking,
    SilentWrites,
    UniformWrites,
    access_threads,
    find_changed,
    find_conflicts,
    group_units,
    threads_by_unit,
    unit_indices,
)
from greenfast.emulator.machine.blocks import WARP, BlockState, ThreadSet
from greenfast.emulator.machine.faults import KernelFaultError
from greenfast.emulator.machine.joint_writes import JOINT_WRITES, JointWrites
from greenfast.emulator.machine.memory import CHUNK
from greenfast.emulator.machine.ordering import BLOCK, CLUSTER, DEVICE, Ordering
from greenfast.emulator.machine.stale_values import StaleReads
from greenfast.emulator.machine.warp_sync import WarpSync
from greenfast.emulator.ptx.syntax import Instruction
from greenfast.spec.kernel import MAP_BYTES

Numbers = NDArray[Any]
#: Reads that are collected before they are recorded.
_MOST_READS = 256
_SHIFT = np.uint64(32)
_NONE = np.zeros(0, np.intp)
_SCOPES = {BLOCK: "block-scope", CLUSTER: "cluster-scope", DEVICE: "device-scope"}
_KINDS = {False: "atomic or volatile read", True: "atomic or volatile write"}
#: The shift of a tag's lane, and the mask of its block. The number is above both.
_LANE, _BLOCK = np.uint64(27), np.uint64((1 << 27) - 1)


class Races:
    """The data races of a machine's threads."""

    def __init__(self, machine: BlockState, record: GlobalRecord, ordering: Ordering) -> None:
        self.m, self.record, self.ordering = machine, record, ordering
        self.warp = 0
        self._position = np.full(machine.geometry.blocks, -1, np.int64)  # of each block of the grid among the residents
        self._position[machine.blocks] = np.arange(len(machine.blocks))
        self.shared_writes = AccessTables(len(machine.shared.data), machine.warps)
        # Offsets, size, number, threads, and whether the threads of a warp read together.
        self._new_reads: list[list[tuple[Numbers, int, int, ThreadSet, bool]]] = [[] for _ in range(machine.warps)]
        self._pdl_mbarriers: set[int] = set()  # mbarriers at which a thread past a griddepcontrol.wait has arrived
        self._shared_reads = [AccessTables(len(machine.shared.data), machine.warps) for _ in range(machine.warps)]
        self.warp_sync = WarpSync(machine, ordering)
        self.atomics = Atomics(self)
        #: Per mbarrier, block and warp: the last phase that was waited for, and the access number of the wait.
        self._waits: dict[int, dict[tuple[int, int], tuple[int, int]]] = {}
        #: Per block and warp: mbarriers with a relaxed wait, and the waiting threads.
        self._relaxed_waits: dict[tuple[int, int], list[tuple[int, Numbers]]] = {}
        self._map_fences: dict[tuple[int, int], int] = {}  # by block and offset of a tensor map: the last fence for it
        #: Warps that may lag at an mbarrier, because no thread waits for them.
        self.laggards: set[int] = set()
        #: Old values that strong reads may return; None: reads return the newest value.
        self.stale: StaleReads | None = None
        #: Stores of several values to one place; None until a launch restarts to record them.
        self.joint_writes = JointWrites() if record.records_joint_writes else None
        #: Loads, by id, that read a place before an atomic access to it.
        self.looks: set[int] = set()
        #: Per place and block: the last strong read, as the access number and the warp.
        self._strong_reads: dict[tuple[str, int, int], tuple[int, int]] = {}

    def begin(self) -> int:
        """Return the number of a new access."""
        number = self.ordering.now = self.record.accesses.add(self.m.current, self.warp)
        return number

    # ---- synchronizing ----------------------------------------------------------------------------------------------

    def complete_barriers(self, keys: Numbers, waiting: Numbers, of: Numbers, per_block: int) -> None:
        """Complete barriers (``per_block`` in each block); waiting: the threads released from the barriers ``of``."""
        m = self.m
        self.pass_pdl_waits(waiting, of)
        living = np.bincount(m.block_of[~m.ended], minlength=len(m.blocks))
        left = np.bincount(of // per_block, minlength=len(m.blocks))
        whole = np.unique(keys // per_block)
        whole = whole[(left[whole] == living[whole]) & (living[whole] > 0)]
        self.warp_sync.join_all(waiting, self.ordering.now)
        self.warp_sync.wait(waiting, self.ordering.now)
        self.ordering.sync_blocks(whole)
        if (
            len(whole) == len(m.blocks) and self.warp_sync.is_single_block
        ):  # every earlier read is ordered before all that follows
            for reads in self._new_reads:
                reads.clear()
        remainder = ~np.isin(of // per_block, whole)
        if remainder.any():
            pairs = np.unique(of[remainder] * m.warps + waiting[remainder] // m.threads_per_warp_slot)
            result: dict[int, tuple[int, list[int]]] = {}
            for key, warp in zip((pairs // m.warps).tolist(), (pairs % m.warps).tolist(), strict=True):
                result.setdefault(key, (key // per_block, []))[1].append(warp)
            self.ordering.complete_barriers(result)

    def pass_pdl_waits(self, waiting: Numbers, of: Numbers) -> None:
        """Mark threads released from the barriers ``of`` as past a griddepcontrol.wait if one of them is."""
        m = self.m
        if m.launches is not None:
            released = np.unique(of[m.after_pdl_wait[waiting]])
            m.after_pdl_wait[waiting[np.isin(of, released)]] = True

    def sync_warp(self, lanes: Numbers) -> None:
        """Synchronize threads at bar.warp.sync, one group of each warp."""
        self.warp_sync.sync_groups(lanes, self.ordering.now)

    def arrive_at(self, rows: Numbers, lanes: ThreadSet, relaxed: bool = False) -> None:
        """Arrive at mbarriers; relaxed: without release semantics."""
        if self.m.launches is not None:
            self._pdl_mbarriers.update(rows[self.m.after_pdl_wait[lanes]].tolist())
        self.warp_sync.arrive(lanes, self.ordering.now)
        for row, block, warp, index in self._each(rows, lanes):
            late = None
            if self.warp_sync.is_single_block and not relaxed:
                threads = np.arange(self.m.lanes)[lanes][index]
                late = self.warp_sync.arriving_clocks(
                    threads, self.ordering.now, self.record.accesses.latest.get(warp, 0)
                )
            self.ordering.release(row, block, warp, relaxed, late)

    def wait_for(self, rows: Numbers, lanes: ThreadSet, relaxed: bool = False) -> None:
        """Complete waits for mbarriers; relaxed: without acquire semantics until the next fence."""
        if self.m.launches is not None and self._pdl_mbarriers:
            self.m.after_pdl_wait[lanes] |= np.isin(rows, list(self._pdl_mbarriers))
        self.warp_sync.wait(lanes, self.ordering.now)
        number, warps = self.begin(), set()
        for row, block, warp, index in self._each(rows, lanes):
            self._waits.setdefault(row, {})[block, warp] = int(self.m.mbarriers.phase[row]) - 1, number
            warps.add(warp)
            threads = np.arange(self.m.lanes)[lanes][index]
            if relaxed:
                self._relaxed_waits.setdefault((block, warp), []).append((row, threads))
                continue
            self._acquire(row, block, warp, threads)
        self.ordering.update_min(np.array(sorted(warps), np.intp))

    def _acquire(self, row: int, block: int, warp: int, threads: Numbers) -> None:
        """Join the clocks of a warp's threads with the clocks that arrivals at an mbarrier released."""
        known = self.ordering.acquire(row, block, warp)
        self.warp_sync.join_all(threads, int(known.min()))
        if known.min() < known.max():
            self.warp_sync.join(threads, known)

    def complete_phases(self, rows: Numbers) -> None:
        """Record warps that may still wait for the previous phase when a phase of the mbarriers completes.

        Such a warp does not contribute to the completion, so it may lag by two phases. Its parity then never comes, or
        belongs to another phase.
        """
        for row in rows.tolist():
            phase = int(self.m.mbarriers.phase[row])
            for (_, warp), (waited, number) in self._waits.get(row, {}).items():
                if waited == phase - 1 and self.ordering.arrived_clock(row, warp) < number:
                    self.laggards.add(warp)

    def _each(self, places: Numbers, lanes: ThreadSet) -> Iterator[tuple[int, int, int, Numbers]]:
        """Yield each distinct place with block and warp, and the positions of its threads."""
        blocks = len(self.m.blocks)
        warps = np.arange(self.m.lanes)[lanes] // WARP
        order = np.lexsort((warps, places))
        first, second = places[order], warps[order]
        starts = np.flatnonzero((np.diff(first) != 0) | (np.diff(second) != 0)) + 1
        for index in np.split(order, starts):
            warp = int(warps[index[0]])
            yield int(places[index[0]]), warp % blocks, warp // blocks, np.sort(index)

    def fence(self, lanes: ThreadSet, scope: int) -> None:
        """Execute a fence."""
        for block in np.unique(self.m.block_of[lanes]).tolist() if self._relaxed_waits else ():
            for row, threads in self._relaxed_waits.pop((block, self.warp), ()):
                self._acquire(row, block, self.warp, threads)
        if self.ordering.through_memory:
            self.ordering.fence(np.unique(self.m.block_of[lanes]).tolist(), self.warp, scope)

    def synchronize(
        self, space: str, offsets: Numbers, lanes: ThreadSet, reads: bool, writes: bool, releases: bool, scope: int
    ) -> None:
        """Execute synchronizing reads or writes of threads, one after the other."""
        self.m.access_lanes = lanes
        if space == "global":
            self._check_launches(offsets, 4, writes)
            if self.record.scoped:
                self.atomics.check_scopes(offsets, 4, scope, writes)
            if writes:
                self._note_inputs(offsets, self.m.memory.owners(offsets))
        self.warp_sync.wait(lanes, self.ordering.now)
        if releases:
            self.fence(lanes, scope)
        if writes and (self.ordering.through_memory or self.stale is not None):
            self.begin()
        if not self.ordering.through_memory:
            return
        warps, indices = set(), np.arange(self.m.lanes)[lanes]
        for offset, block, warp, index in self._each(offsets, lanes):
            threads = indices[index]
            if reads:
                warps.add(warp)
                self._strong_reads[space, offset, block] = self.ordering.now, warp
                self.ordering.load_acquire(space, offset, block, warp, scope)
                self._acquire_plain_write(space, offset, block, warp, scope, threads)
                known = self.ordering.load_acquire_lanes(space, offset, block, warp)
                if known is not None:
                    self.warp_sync.join(threads, known)
            if writes:
                until = self.ordering.store_release(space, offset, block, warp, scope)
                if reads and len(threads) > 1:  # each thread reads the value of the thread before it
                    self.warp_sync.join(threads, np.tri(WARP, WARP, -1, np.int64)[threads % WARP] * until)
                passed = self.warp_sync.clocks(threads).max(axis=0)
                passed[threads % WARP] = until
                self.ordering.store_release_lanes(space, offset, block, warp, np.minimum(passed, until))
        self.ordering.update_min(np.array(sorted(warps), np.intp))

    def _acquire_plain_write(
        self, space: str, offset: int, block: int, warp: int, scope: int, threads: Numbers
    ) -> None:
        """Acquire from an ordinary write that sets a flag or opens a lock.

        That write takes part in no race from then on.
        """
        ordering = self.ordering
        if space == "global":
            tag = int(self.record.last_writes(WORD)[offset // WORD])
            writer, number = int(self._position[(tag & int(_BLOCK)) - 1]) if tag else -1, tag >> 32
            if writer >= 0 and writer != block:
                if scope >= DEVICE:
                    self.record.last_writes(WORD)[offset // WORD] = 0
                    np.maximum(ordering.blocks[block], ordering.fenced[DEVICE][writer], out=ordering.blocks[block])
                return
        else:
            number = int(self.shared_writes[WORD].entries[offset // WORD])
            writer = block if number else -1
        by = int(self.record.accesses.warps[number])
        if writer < 0:
            return
        if by == warp:
            self.warp_sync.join_all(threads, ordering.fenced_warps[block, warp, warp])
            return
        known = ordering.snapshot(block, by)
        known[0] = ordering.fenced_warps[block, by]
        ordering.join(block, warp, known)
        if space == "shared":
            self.shared_writes[WORD].entries[offset // WORD] = 0

    def _has_read(self, space: str, offset: int, lane: int, number: int) -> bool:
        """Return whether a thread's block has read a place by a strong read since an access, ordered before now.

        A counter may be reset by an ordinary write after a wait for its last value.
        """
        block = int(self.m.block_of[lane])
        seen, warp = self._strong_reads.get((space, offset, block), (-1, 0))
        return seen >= number and (warp == self.warp or int(self.ordering.warps[block, self.warp, warp]) >= seen)

    # ---- shared memory ----------------------------------------------------------------------------------------------

    def read_shared(self, offsets: Numbers, size: int) -> None:
        """Check and record a read of ``size`` bytes per thread."""
        number = self.begin()
        self.check_tables(self.shared_writes, offsets, size, "read", "write")
        if id(self.m.current) not in self.looks:
            self.atomics.check_read(offsets, size)
        self._new_reads[self.warp].append((offsets, size, number, self.m.access_lanes, self.warp_sync.collective))
        if len(self._new_reads[self.warp]) > _MOST_READS:
            self._record_reads(self.warp)

    def read_product(self, offsets: Numbers, warps: Sequence[int]) -> None:
        """Check that a wgmma of some warps reads each CHUNK bytes after all writes of other warps."""
        current = self.warp
        for self.warp in warps:
            for table in self.shared_writes.values():
                if table.latest_other(self.warp) > self.ordering.min_clock[self.warp]:
                    self.check_shared(table, offsets // CHUNK, CHUNK, "read", "write", None)
        self.warp = current

    def write_shared(self, offsets: Numbers, size: int, values: Numbers | None) -> None:
        """Check and record a write of ``size`` bytes per thread; values: (threads, size), None if they arrive later."""
        number = self.begin()
        threads = self.threads(len(offsets))
        unit, rows, size = group_units(offsets, size)
        floor, mine = self.ordering.min_clock[self.warp], threads_by_unit(threads, len(rows), size // unit)
        silent = np.zeros(len(rows), np.bool_)
        for table in self.shared_writes.values():
            if table.latest_other(self.warp) > floor:
                unchanged = self.check_shared(table, rows, size, "write", "write", values)
                silent[unchanged] |= table.unit == unit
            if values is not None:
                unchanged = self.check_warp(table, rows, size, mine, "write", "write", values)
                silent[unchanged] |= table.unit == unit
        if self.joint_writes is not None and values is not None:
            self.joint_writes.record(number, rows, size, values)
        self.atomics.check_write(rows, size, mine, values)
        if self.m.products is not None and self.warp_sync.is_single_block:
            self._check_products(offsets)
        for warp, tables in enumerate(self._shared_reads):
            if warp != self.warp and self._new_reads[warp]:
                self._record_reads(warp)
            for table in tables.values() if warp != self.warp else ():
                if table.latest[warp] > floor:
                    self.check_shared(table, rows, size, "write", "read", values)
        if self._new_reads[self.warp] and self._new_reads[self.warp][-1][2] > self.warp_sync.min_clock(self.warp):
            self._record_reads(self.warp)
        for table in self._shared_reads[self.warp].values():
            self.check_warp(table, rows, size, mine, "write", "read", values)
        if values is None:
            mine = np.full((len(rows), 1), -1)
        if self.warp_sync.collective and values is not None:
            mine = self.warp_sync.mark_collective(mine)
        table = self.shared_writes[unit]
        if silent.any():
            table.put_silent(rows[silent], size, number)
        table.put(rows, size, number, self.warp, mine)
        if values is not None and not self.warp_sync.collective:
            table.record_uniform(rows, size, number, values, mine, self.m.block_of)

    def _check_products(self, offsets: Numbers) -> None:
        """Report a write that is not ordered after a warp's wait for a wgmma that reads the same memory."""
        products, m = self.m.products, self.m
        assert products is not None
        chunks = np.unique(offsets // CHUNK)
        for warpgroup, readers in products.readers.items():
            for number in np.unique(readers[chunks]).tolist():
                if not number:
                    continue
                reads = products.waited[number]
                mine = chunks[readers[chunks] == number]
                blocks = np.unique(mine * CHUNK // m.shared_stride)
                waits = reads.numbers[:, np.searchsorted(reads.blocks, blocks)]
                group = warpgroup * len(waits) + np.arange(len(waits))
                known = self.ordering.warps[blocks[:, None], self.warp, group].T
                bad = np.flatnonzero(~((waits > 0) & (known >= waits)).any(axis=0))
                if len(bad):
                    chunk = int(mine[mine * CHUNK // m.shared_stride == blocks[bad[0]]][0])
                    lane = self._lane(int(np.flatnonzero(offsets // CHUNK == chunk)[0]), len(offsets))
                    location = m.describe_shared(chunk * CHUNK)
                    reason = f"a data race on {location}: this write is not ordered after a "
                    reason += f"wgmma.wait_group for the wgmma at {reads.instruction.place} that reads there"
                    reason += " (released too early?), found"
                    raise m.fault(reason, lane, location)

    def record_finished(
        self, offsets: Numbers, size: int, lanes: Numbers, writes: bool, instruction: Instruction
    ) -> None:
        """Record accesses to shared memory that threads of one warp began earlier and have now waited for."""
        warp = int(lanes[0]) // self.m.threads_per_warp_slot
        number = self.ordering.now = self.record.accesses.add(instruction, warp)
        unit, rows, whole = group_units(offsets, size)
        threads = threads_by_unit(self.threads(len(offsets), lanes), len(rows), whole // unit)
        table = self.shared_writes if writes else self._shared_reads[warp]
        table[unit].put(rows, whole, number, warp, threads)

    def _record_reads(self, warp: int) -> None:
        """Record the collected reads of a warp.

        Most warps never write there before the next barrier, so this is done late.
        """
        for offsets, size, number, lanes, collective in self._new_reads[warp]:
            unit, rows, whole = group_units(offsets, size)
            threads = threads_by_unit(self.threads(len(offsets), lanes), len(rows), whole // unit)
            if collective:
                threads = self.warp_sync.mark_collective(threads)
            self._shared_reads[warp][unit].put(rows, whole, number, warp, threads)
        self._new_reads[warp].clear()

    def threads(self, count: int, lanes: ThreadSet | None = None) -> Numbers:
        """Return the thread of each element of an access by ``lanes`` (default: the current access)."""
        return access_threads(self.m.access_lanes if lanes is None else lanes, count)

    def check_tables(self, tables: AccessTables, offsets: Numbers, size: int, access: str, other: str) -> None:
        """Report an access of ``size`` bytes per thread that is not ordered after one in the tables."""
        floor, least = self.ordering.min_clock[self.warp], self.warp_sync.min_clock(self.warp)
        for table in tables.values():
            unordered = table.latest_other(self.warp) > floor
            if not unordered and table.latest[self.warp] <= least:
                continue
            unit, rows, whole = group_units(offsets, size)
            if unordered:
                self.check_shared(table, rows, whole, access, other, None)
            mine = threads_by_unit(self.threads(len(offsets)), len(rows), whole // unit)
            self.check_warp(table, rows, whole, mine, access, other, None)

    def check_warp(
        self, table: AccessTable, rows: Numbers, size: int, mine: Numbers, access: str, other: str, values: Any
    ) -> Numbers:
        """Report accesses that are not ordered after one of another thread of the warp.

        Return the elements that rewrite the value of an unordered write.
        """
        least = self.warp_sync.min_clock(self.warp)
        if table.latest[self.warp] <= least:
            return _NONE
        numbers = table.get_numbers(rows, size)
        late = (numbers > least) & (self.record.accesses.warps[numbers] == self.warp)
        if not late.any():
            return _NONE
        mine = np.repeat(mine, -(-numbers.shape[1] // mine.shape[1]), axis=1)[:, : numbers.shape[1]]
        others = table.get_threads(rows, size)
        bad = late & self.warp_sync.unordered(numbers, mine, others)
        if values is None and access == "write":  # an asynchronous copy
            bad &= numbers > self.warp_sync.converged[others % self.m.lanes]
        if not bad.any():
            return _NONE
        silent = _NONE
        if values is not None:
            changed = find_changed(self.m.shared, rows * size, size, values)[:, None]
            silent, bad = np.flatnonzero((bad & ~changed).any(axis=1)), bad & changed
        harmful = bad
        if access == "read":
            bad &= ~table.is_writer(rows, size, numbers, mine, self.m.block_of)
            first_numbers, first_threads = table.origins(rows, size)
            harmful = bad & self.warp_sync.unordered(first_numbers, mine, first_threads)
        if bad.any():
            row, column = np.argwhere(harmful if harmful.any() else bad)[0]
            lane = int(mine[row, column])
            block = int(self.m.blocks[self.m.block_of[others[row, column] % self.m.lanes]])
            location = self.m.describe_shared(int(rows[row]) * size)
            self._report(bool(harmful.any()), access, other, int(numbers[row, column]), location, block, lane)
        return silent

    def check_shared(
        self, table: AccessTable, rows: Numbers, size: int, access: str, other: str, values: Any
    ) -> Numbers:
        """Report accesses that are not ordered after one of another warp.

        Return the elements that rewrite the value of an unordered write.
        """
        numbers, m = table.get_numbers(rows, size), self.m
        floor = self.ordering.min_clock[self.warp]
        if int(numbers.max()) <= floor:
            return _NONE
        late = np.flatnonzero(numbers > floor)
        late = late[self.record.accesses.warps[numbers.ravel()[late]] != self.warp]
        if not len(late):
            return _NONE
        elements, numbers = late // numbers.shape[1], numbers.ravel()[late]
        others = table.get_threads(rows, size).ravel()[late]
        bad = self._is_unordered(rows, elements, size, numbers, others)
        if other == "atomic access" and self._strong_reads:
            units = table.get_numbers(rows, size).shape[1]
            for n in np.flatnonzero(bad).tolist():
                offset = int(rows[elements[n]]) * size + int(late[n]) % units * table.unit
                bad[n] = not self._has_read("shared", offset, self._lane(int(elements[n]), len(rows)), int(numbers[n]))
        if not bad.any():
            return _NONE
        silent = _NONE
        if values is not None:
            changed = find_changed(m.shared, rows * size, size, values)[elements]
            silent, bad = elements[bad & ~changed], bad & changed
        if values is not None and other == "write" and bad.any():
            bad = self._find_races_of_writes(bad, rows, elements, size, numbers, values)
        harmful = bad
        if access == "read" and other == "write":
            first_numbers, first_threads = (a.ravel()[late] for a in table.origins(rows, size))
            harmful = bad & self._is_unordered(rows, elements, size, first_numbers, first_threads)
        if bad.any():
            first = int(np.flatnonzero(harmful if harmful.any() else bad)[0])
            row = int(elements[first])
            lane = self._lane(row, len(rows))
            block = int(m.blocks[m.block_of[others[first] % m.lanes if others[first] >= 0 else lane]])
            location = m.describe_shared(int(rows[row]) * size)
            self._report(bool(harmful.any()), access, other, int(numbers[first]), location, block, lane)
        return silent

    def _find_races_of_writes(
        self, bad: NDArray[np.bool_], rows: Numbers, elements: Numbers, size: int, numbers: Numbers, values: Any
    ) -> NDArray[np.bool_]:
        """Return the unordered writes, except joint writes of the same values (JointWrites).

        If the launch does not record joint writes yet, and the writes are by one instruction, raises
        RestartWithReadTracking to record them.
        """
        bad = bad.copy()
        for n in np.flatnonzero(bad).tolist():
            if self.record.accesses.instructions[numbers[n]] is not self.m.current:
                continue
            if self.joint_writes is None:
                raise RestartWithReadTracking(JOINT_WRITES)
            bad[n] = not self.joint_writes.agree(int(rows[elements[n]]), size, int(numbers[n]), rows, values)
        return bad

    def _is_unordered(
        self, rows: Numbers, elements: Numbers, size: int, numbers: Numbers, others: Numbers
    ) -> NDArray[np.bool_]:
        """Return a mask of the accesses to shared memory that are not ordered before the current one."""
        blocks = rows[elements] * size // self.m.shared_stride
        bad: NDArray[np.bool_] = numbers > self.ordering.warps[blocks, self.warp, self.record.accesses.warps[numbers]]
        if not self.warp_sync.is_single_block:
            mine = self.threads(len(rows))[elements]
            remote = self.warp_sync.unordered(numbers, mine, others)
            bad = np.where(self.warp_sync.is_remote(blocks, mine, others), remote, bad)
        if self.ordering.late:
            lanes = np.where(others >= 0, others % WARP, -1)
            bad |= self.ordering.is_late(blocks, self.warp, self.record.accesses.warps[numbers], lanes, numbers)
        return bad

    # ---- global memory ----------------------------------------------------------------------------------------------

    def read_global(self, offsets: Numbers, size: int) -> None:
        """Check and record a read of ``size`` bytes per thread."""
        record = self.record
        self._check_launches(offsets, size, False)
        owners = record.memory.owners(offsets)
        if record.dirty.isdisjoint(owners) and record.tracked.isdisjoint(owners):
            record.read.update(owners)
            return
        number = self.begin()
        mine = self.tags(number, len(offsets))
        self.check_global(record.writes, offsets, size, mine, "read", "write", None)
        if "nc" in self.m.current.parts and (result := record.find_write(offsets, size)) is not None:
            self.m.report_race(self.m.fault(result[1], self._lane(result[0], len(offsets))))
        record.read.update(owners - record.tracked - record.dirty)
        unit, places = unit_indices(offsets, size)
        mine = mine[:, None]
        last, other = record.last_reads(unit)
        before = last[places]
        moved = (before & _BLOCK != mine & _BLOCK) & (before > 0)
        other[places[moved]] = before[moved]
        last[places] = mine
        lost = last[places] & _BLOCK != mine & _BLOCK  # two blocks in one access
        other[places[lost]] = np.broadcast_to(mine, places.shape)[lost]

    def write_global(self, offsets: Numbers, size: int, values: Numbers | None) -> None:
        """Check and record a write of (threads, size) bytes."""
        record = self.record
        self._check_launches(offsets, size, True)
        owners = record.memory.owners(offsets)
        self._note_inputs(offsets, owners)
        for owner in (owners & record.read) - record.tracked:
            raise RestartWithReadTracking(record.memory.get_name(owner))
        record.dirty |= owners
        number = self.begin()
        mine = self.tags(number, len(offsets))
        unit, places = unit_indices(offsets, size)
        silent = self.check_global(record.writes, offsets, size, mine, "write", "write", values)
        self.check_global(record.atomics, offsets, size, mine, "write", "atomic access", values)
        for n in range(2):
            self.check_global({u: t[n] for u, t in record.reads.items()}, offsets, size, mine, "write", "read", values)
        table = record.last_writes(unit)
        if len(silent):
            records = record.silent.setdefault(unit, SilentWrites(len(table)))
            records.put(places[silent], number, table[places[silent]])
        mine = mine[:, None]
        table[places] = mine
        lost = table[places] & _BLOCK != mine & _BLOCK  # another block wrote it in the same access
        if values is None:
            return
        if lost.any():
            self._check_together(offsets, values, lost, number)
            record.joint[number] = np.unique(places.astype(np.uint64) << _SHIFT | mine & _BLOCK)
        if (table[places] != mine).any():  # or another thread of the warp
            agreeing = record.agreeing.setdefault(unit, UniformWrites(len(table)))
            threads = np.repeat(self.threads(len(offsets)), places.shape[1])
            agreeing.put(places.ravel(), number, values.reshape(-1, unit), threads, self.m.block_of)

    def fence_tensormap(self, offset: int, blocks: list[int]) -> None:
        """Execute fence.proxy.tensormap::generic.acquire for a tensor map in some blocks."""
        number = self.begin()
        for block in blocks:
            self._map_fences[block, offset] = number

    def require_tensormap_fence(self, offset: int, lane: int) -> None:
        """Report a tensor map that the launch has written unless the thread's block has a fence for it since then."""
        tables = self.record.writes.items()
        last = max((int(t[offset // u : (offset + MAP_BYTES) // u].max()) >> 32 for u, t in tables), default=0)
        if last > self._map_fences.get((int(self.m.block_of[lane]), offset), 0):
            reason = "a tensor map that this launch has written, used without a fence.proxy.tensormap::generic.acquire"
            self.m.report_formal("no-tensormap-fence", f"{reason} since: {self.m.memory.describe(offset)}", lane)

    def _note_inputs(self, offsets: Numbers, owners: set[int]) -> None:
        """Record writes to inputs, also of the same value: a kernel may restore values that it overwrote."""
        for name, row in self.record.find_inputs(offsets, owners):
            reason = f"a write to an input: {self.m.memory.describe(int(offsets[row]))}"
            self.record.input_writes.setdefault(name, str(self.m.fault(reason, self._lane(row, len(offsets)))))

    def _check_launches(self, offsets: Numbers, size: int, writes: bool) -> None:
        if self.m.launches is not None:
            threads = self.threads(len(offsets))
            waited = self.m.after_pdl_wait[threads]
            violation = self.m.launches.record(offsets, size, writes, waited, self.m.current)
            if violation is not None:
                raise self.m.fault(violation[1], int(threads[violation[0]]))

    def tags(self, number: int, count: int) -> Numbers:
        """Return the log entry of each element of an access to global memory."""
        threads = self.threads(count)
        blocks = self.m.blocks[self.m.block_of[threads]].astype(np.uint64)
        lanes = (threads % WARP).astype(np.uint64)
        return (blocks + np.uint64(1)) | lanes << _LANE | np.uint64(number) << _SHIFT

    def check_global(
        self,
        tables: dict[int, Numbers],
        offsets: Numbers,
        size: int,
        mine: Numbers,
        access: str,
        other: str,
        values: Any,
        scope: int = 0,
    ) -> Numbers:
        """Report accesses that are not ordered after one of another warp or block.

        scope: accesses of blocks in one group of so many neighbours are exempt; 0: only accesses of one warp are. With
        ``values``, return the elements that rewrite the value of an unordered access.
        """
        m, record, silent = self.m, self.record, _NONE
        compares = values is not None or access in ("read", "atomic access")  # no asynchronous copy
        for unit, table in tables.items():
            places = offsets[:, None] // unit + np.arange(max(1, size // unit))
            tags = table[places]
            if not tags.any():
                continue
            bad = self._is_tag_unordered(tags, mine, scope, compares)
            if access == "read" and unit in record.agreeing and bad.any():
                numbers = (tags >> _SHIFT).astype(np.int64)
                same_warp = (tags & _BLOCK == (mine & _BLOCK)[:, None]) & (record.accesses.warps[numbers] == self.warp)
                lanes = self.threads(len(offsets))[:, None] % WARP
                bad &= ~(same_warp & record.agreeing[unit].has(places, numbers, lanes))
            if other == "atomic access" and self._strong_reads:
                for row, column in np.argwhere(bad).tolist():
                    number, lane = int(tags[row, column]) >> 32, self._lane(row, len(offsets))
                    bad[row, column] = not self._has_read("global", int(places[row, column]) * unit, lane, number)
            if not bad.any():
                continue
            if values is not None:
                changed = find_changed(m.memory, offsets, size, values)[:, None]
                if unit == unit_indices(offsets[:1], size)[0]:
                    silent = np.flatnonzero((bad & ~changed).any(axis=1))
                bad &= changed
            harmful = bad
            if access == "read":
                first = record.silent[unit].origins(places, tags) if unit in record.silent else tags
                harmful = bad & self._is_tag_unordered(first, mine, scope, compares)
                harmful &= ~self._wrote_jointly(places, first, mine)
            if bad.any():
                row, column = np.argwhere(harmful if harmful.any() else bad)[0]
                location = m.memory.describe(int(offsets[row]))
                lane, tag = self._lane(int(row), len(offsets)), int(tags[row, column])
                block = (tag & int(_BLOCK)) - 1
                self._report(bool(harmful.any()), access, other, tag >> 32, location, block, lane)
        return silent

    def _is_tag_unordered(self, tags: Numbers, mine: Numbers, scope: int, compares: bool) -> NDArray[np.bool_]:
        """Return a mask (elements, units) of accesses to global memory that are not ordered before the current one.

        compares: whether to compare the threads of one warp as well.
        """
        m, ordering = self.m, self.ordering
        numbers, blocks = (tags >> _SHIFT).astype(np.int64), (tags & _BLOCK).astype(np.int64) - 1
        own = (mine & _BLOCK).astype(np.int64)[:, None] - 1
        by = self.record.accesses.warps[numbers]
        here, first = self._position[own], self._position[blocks]
        inside = first >= 0
        known = ordering.warps[here, self.warp, np.minimum(by, m.warps - 1)]
        if ordering.through_memory:  # blocks that ended before the resident ones began are ignored
            between = np.where(inside, ordering.blocks[here, np.where(inside, first, 0)], numbers)
        else:
            between = np.zeros(1, np.int64)
        same = inside & (here // scope == first // scope) if scope else (blocks == own) & (by == self.warp)
        bad: NDArray[np.bool_] = (numbers > np.where(blocks == own, known, between)) & ~same
        if compares:
            lanes = (tags >> _LANE & np.uint64(WARP - 1)).astype(np.int64)
            others = self.warp * m.threads_per_warp_slot + here * WARP + lanes
            bad |= same & self.warp_sync.unordered(numbers, self.threads(len(mine))[:, None], others)
        return bad

    def _wrote_jointly(self, places: Numbers, tags: Numbers, mine: Numbers) -> NDArray[np.bool_]:
        """Return a mask of the places where the current block and others wrote one value in one access."""
        joint: NDArray[np.bool_] = np.zeros(places.shape, np.bool_)
        numbers = tags >> _SHIFT
        for number in np.unique(numbers).tolist() if self.record.joint else ():
            if number in self.record.joint:
                keys = places.astype(np.uint64) << _SHIFT | (mine & _BLOCK)[:, None]
                joint |= (numbers == np.uint64(number)) & np.isin(keys, self.record.joint[number])
        return joint

    def _check_together(self, offsets: Numbers, values: Numbers, lost: Numbers, number: int) -> None:
        """Report a fault if blocks write different values to one place in the same access.

        Among threads of one warp this is no race: one of them wins (CUDA C++ Programming Guide, "SIMT Architecture").
        """
        for winner, row in find_conflicts(offsets, values, lost):
            block = int(self.m.blocks[self.m.block_of[self._lane(winner, len(offsets))]])
            location = self.m.memory.describe(int(offsets[row]))
            self.m.report_race(self.fault("write", "write", number, location, block, self._lane(row, len(offsets))))

    # ---- faults -----------------------------------------------------------------------------------------------------

    def _lane(self, row: int, count: int) -> int:
        """Return the thread of an element of the access."""
        return int(self.threads(count)[row])

    def _report(
        self, harmful: bool, access: str, other: str, number: int, location: str, block: int, lane: int
    ) -> None:
        """Raise the fault of two unordered accesses. Report a formal finding if all orders give the same value."""
        fault = self.fault(access, other, number, location, block, lane)
        if harmful:
            self.m.report_race(fault)
            return
        reason = fault.reason.removesuffix(", found")
        self.m.report_formal("same-value-race", f"{reason}; both threads wrote the same value, found", lane)

    def fault(self, access: str, other: str, number: int, location: str, block: int, lane: int) -> KernelFaultError:
        """Return the fault of two unordered accesses; ``block``: of the earlier one."""
        earlier = self.record.accesses.instructions[number]
        assert earlier is not None
        reader = f"warp {self.record.accesses.warps[number]} of {self.m.block_name(block)}"
        fault = self.m.fault(
            f"a data race on {location}: nothing orders this {access} and the {other} at {earlier.place} "
            f"(in: {earlier.short_text}) by {reader}, found",
            lane,
            location,
        )
        fault.read = self.m.current if access == "read" else earlier if other == "read" else None
        return fault


class Atomics:
    """The atomic accesses of the resident blocks, checked against unordered ordinary writes to the same place.

    An ordinary write between the read and the write of an atomic access may be lost, and vice versa. Only atomic
    accesses that change a value count. Compare-and-swap and exchange may meet an earlier ordinary write, because locks
    are released by ordinary writes. Ordinary reads are allowed in global memory, and in shared memory if an atomic
    access to the same address operand follows: many kernels read first and then act atomically.
    An access of block (.cta) or cluster scope is not atomic for threads outside of this scope.
    """

    def __init__(self, races: Races) -> None:
        self.races = races
        self._shared = AccessTables(len(races.m.shared.data), races.m.warps)

    def check(self, space: str, offsets: Numbers, size: int, scope: int, lock: bool) -> None:
        """Check an atomic access of ``size`` bytes per thread against racing writes, unless it may take a lock.

        scope: within which it is atomic.
        """
        races = self.races
        if lock:
            return
        if space == "global":
            tags = races.tags(races.begin(), len(offsets))
            races.check_global(races.record.writes, offsets, size, tags, "atomic access", "write", None)
        else:
            races.check_tables(races.shared_writes, offsets, size, "atomic access", "write")

    def check_scopes(self, offsets: Numbers, size: int, scope: int, writes: bool) -> None:
        """Check an atomic, volatile, relaxed, acquire or release access to global memory against earlier ones.

        Two of them, one of them a write, are a race unless each thread is in the scope of the other's access.
        """
        races, m = self.races, self.races.m
        number = races.begin()
        tags = races.tags(number, len(offsets))
        for (other_scope, other_writes), tables in races.record.strong.items():
            common = min(scope, other_scope)
            if (writes or other_writes) and common < DEVICE and len(m.blocks) > 1:
                access, other = (f"{_SCOPES[s]} {_KINDS[w]}" for s, w in ((scope, writes), (other_scope, other_writes)))
                blocks = 1 if common == BLOCK else m.geometry.cluster_size
                races.check_global(tables, offsets, size, tags, access, other, None, blocks)
        if writes and scope < DEVICE:
            self._check_lockstep(offsets, scope, number)
        unit, places = unit_indices(offsets, size)
        tables = races.record.strong.setdefault((scope, writes), {})
        if unit not in tables:
            tables[unit] = np.zeros(len(m.memory.data) // unit, np.uint64)
        tables[unit][places] = tags[:, None]

    def _check_lockstep(self, offsets: Numbers, scope: int, number: int) -> None:
        """Report a fault if threads beyond each other's scope write to one place in the same instruction."""
        races, m = self.races, self.races.m
        blocks = m.block_of[races.threads(len(offsets))] // (1 if scope == BLOCK else m.geometry.cluster_size)
        order = np.lexsort((blocks, offsets))
        same, apart = np.diff(offsets[order]) == 0, np.diff(blocks[order]) != 0
        for index in np.flatnonzero(same & apart):
            first, second = (int(races.threads(len(offsets))[row]) for row in order[index : index + 2])
            access, location = f"{_SCOPES[scope]} {_KINDS[True]}", m.memory.describe(int(offsets[order[index]]))
            block = int(m.blocks[m.block_of[first]])
            m.report_race(races.fault(access, access, number, location, block, second))

    def record(self, space: str, offsets: Numbers, size: int) -> None:
        """Record that the threads ``access_lanes`` have changed ``size`` bytes each atomically."""
        races = self.races
        number = races.begin()
        if space == "global":
            unit, places = unit_indices(offsets, size)
            races.record.last_writes(unit, atomic=True)[places] = races.tags(number, len(offsets))[:, None]
        else:
            unit, rows, whole = group_units(offsets, size)
            threads = races.threads(len(offsets))
            _, place, count = np.unique(offsets, return_inverse=True, return_counts=True)
            # If several threads access one place, the access counts as another thread's for each of them.
            threads = np.where(count[place] > 1, races.warp_sync.mark_collective(threads), threads)
            self._shared[unit].put(rows, whole, number, races.warp, threads_by_unit(threads, len(rows), whole // unit))

    def check_read(self, offsets: Numbers, size: int) -> None:
        """Check an ordinary read of shared memory against atomic accesses."""
        self.races.check_tables(self._shared, offsets, size, "read", "atomic access")

    def check_write(self, rows: Numbers, size: int, mine: Numbers, values: Numbers | None) -> None:
        """Check an ordinary write to shared memory by the threads ``mine`` against atomic accesses."""
        races = self.races
        for table in self._shared.values():
            if values is not None:
                races.check_warp(table, rows, size, mine, "write", "atomic access", values)
            if table.latest_other(races.warp) > races.ordering.min_clock[races.warp]:
                races.check_shared(table, rows, size, "write", "atomic access", values)

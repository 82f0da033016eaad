"""The memories and the state of the race checks, as a compiled stretch gets them."""

from __future__ import annotations

from typing import Any

import numpy as np

from greenfast.emulator.machine.blocks import WARP, ThreadSet
from greenfast.emulator.machine.epochs import EPOCH_SHIFT, EpochRaces
from greenfast.emulator.machine.state import ResidentBlocks


class Slot:
    """The entries of the context of a call: its threads, then the memories, then the state of the race checks."""

    (
        LANES, START, COUNT, OWN, EPOCH, BLOCK_FLOOR, WARP_FLOOR,
        SHARED_DATA, SHARED_STATE, SHARED_START, SHARED_LIMIT, SHARED_WRITES, SHARED_READS, SHARED_WRITTEN,
        GLOBAL_DATA, GLOBAL_STATE, GLOBAL_BASE, GLOBAL_SIZE, GLOBAL_WRITES, GLOBAL_READS, OWNERS, FLAGS,
        LOCAL_DATA, LOCAL_STATE, LOCAL_START, LOCAL_LIMIT, PARAMS,
        END,
    ) = range(28)  # fmt: skip


#: Flags of an allocation: the launch has read it without a record, its reads are recorded, a kernel may only read it.
READ, TRACKED, INPUT = 1, 2, 4
#: The status of a call: done, to be interpreted, or this plus an allocation's number: its reads must be recorded.
DONE, INTERPRET, FIRST_OWNER = 0, 1, 2
#: The bytes to which the table of owners has an entry.
OWNER_SHIFT = 9
#: Per access: the pattern of the last warp (its threads' addresses relative to the first, the lowest bits of that), the
#: two counts of it, and its lowest and highest address.
CACHE_SLOTS = WARP + 5
#: Per access: two counts, and the first and last byte (MemoryCode.count).
ACCESS_COUNTS = 4


class CallContext:
    """The context of the calls on a machine; tags: see MemoryCode."""

    def __init__(self, machine: ResidentBlocks, tags: bool) -> None:
        self.m, self.tags = machine, tags
        m = machine
        self.slots = np.zeros(Slot.END, np.int64)
        self.address = self.slots.ctypes.data
        self._set(Slot.PARAMS, m.param_memory.data)
        self.races = m.races if isinstance(m.races, EpochRaces) else None
        if self.races is not None:
            self._describe_memory(self.races)

    def _set(self, slot: int, array: Any) -> None:
        """Set a slot to the address of an array. The machine must keep the array alive."""
        self.slots[slot] = array.ctypes.data

    def _describe_memory(self, races: EpochRaces) -> None:
        m, slots = self.m, self.slots
        own, block_floor, warp_floor = races.tags_by_thread
        for slot, array in ((Slot.OWN, own), (Slot.BLOCK_FLOOR, block_floor), (Slot.WARP_FLOOR, warp_floor)):
            self._set(slot, array)
        for first, arena in ((Slot.SHARED_DATA, m.shared), (Slot.GLOBAL_DATA, m.memory), (Slot.LOCAL_DATA, m.local)):
            self._set(first, arena.data)
            self._set(first + 1, arena.state)
        self._set(Slot.SHARED_START, m.shared_start)
        self._set(Slot.LOCAL_START, m.local_start)
        slots[Slot.SHARED_LIMIT], slots[Slot.LOCAL_LIMIT] = m.shared_bytes, m.local_bytes
        slots[Slot.GLOBAL_BASE], slots[Slot.GLOBAL_SIZE] = m.memory.base, m.memory.size
        self.shared, self.globals = races.shared_log, races.global_log
        for first, log in ((Slot.SHARED_WRITES, self.shared), (Slot.GLOBAL_WRITES, self.globals)):
            self._set(first, log.writes.table)
            self._set(first + 1, log.reads.table)
        record = races.record
        self._flags = np.zeros(len(m.memory.starts) + 1, np.uint8)
        self._flags[sorted(record.inputs)] |= INPUT
        self._flags[sorted(record.tracked)] |= TRACKED
        self._set(Slot.FLAGS, self._flags)
        self._seen = b""
        self._known = (-1, -1)

    @property
    def overlaps(self) -> bool:
        """Return whether the program writes shared memory near to where it has read since the last barrier."""
        return self.races is not None and self.races.overlaps

    @property
    def read_spans(self) -> dict[object, Any] | None:
        """Return the spans of the loads from shared memory since the last barrier; None if tags are recorded."""
        return None if self.tags or self.races is None else self.races.read_spans

    def check_span(self, first: int, last: int) -> None:
        """Restart if a load has read a place that a store may have written since the last barrier."""
        if self.races is not None:
            self.races.check_spans(first, last)

    def set_threads(self, lanes: ThreadSet) -> None:
        """Set the threads of the next call."""
        if isinstance(lanes, slice):
            self.slots[Slot.START], self.slots[Slot.COUNT] = lanes.start, lanes.stop - lanes.start
        else:
            self._lanes = np.ascontiguousarray(lanes, np.int64)
            self.slots[Slot.LANES], self.slots[Slot.COUNT] = self._lanes.ctypes.data, len(lanes)

    def begin(self, loads: set[str], stores: set[str]) -> None:
        """Pass the state of the race checks to the next call; loads, stores: the memories that it accesses."""
        races = self.races
        assert races is not None
        self.slots[Slot.EPOCH] = races.epoch << EPOCH_SHIFT
        if "shared" in stores:
            races.record_collected_reads()
            self.shared.writes.latest = races.epoch
        if "shared" in loads and self.tags:
            self.shared.reads.latest = races.epoch
        self.slots[Slot.SHARED_WRITTEN] = self.shared.writes.latest >= races.least
        if "global" not in loads and "global" not in stores:
            return
        if not self.slots[Slot.OWNERS]:
            self._set(Slot.OWNERS, self.m.memory.find_owners(OWNER_SHIFT))
        record = races.record
        known = len(record.read), len(record.dirty)
        if known != self._known:
            self._known = known
            self._flags[sorted(record.read)] |= READ
            self._flags[sorted(record.dirty)] |= TRACKED
            self._seen = self._flags.tobytes()

    def end(self, loads: set[str], stores: set[str]) -> None:
        """Report the accesses of the call to the race checks."""
        self.m.shared.writes += "shared" in stores
        self.m.memory.writes += "global" in stores
        if "global" not in loads and "global" not in stores:
            return
        assert self.races is not None
        seen, record = self._flags.tobytes(), self.races.record
        if seen != self._seen:
            self._seen = seen
            record.read.update(np.flatnonzero(self._flags & (READ | TRACKED) == READ).tolist())
            record.dirty.update(set(np.flatnonzero(self._flags & TRACKED).tolist()) - record.tracked)
            self._known = len(record.read), len(record.dirty)
        if "global" in stores:
            self.globals.writes.latest = self.races.epoch
        self.globals.reads.latest = self.races.epoch

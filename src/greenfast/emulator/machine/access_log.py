"""Logs of memory accesses: their numbers, and the last writers and readers of each word."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from greenfast.emulator.machine.blocks import WARP, ThreadSet, lane_indices
from greenfast.emulator.machine.joint_writes import JOINT_WRITES
from greenfast.emulator.machine.memory import Arena, GlobalMemory
from greenfast.emulator.ptx.syntax import Instruction

Numbers = NDArray[Any]
#: Units of accesses: words, and for narrower ones bytes.
WORD = 4
#: Bytes that are taken together.
_PIECE = 16
_STEPS = {1 << n: np.arange(0, _PIECE, 1 << n) for n in range(5)}
_SHIFTS = {1 << n: n for n in range(5)}
_SHIFT = np.uint64(32)
_VIEWS: dict[int, Any] = {1: np.uint32, 2: np.uint64, 4: np.complex128}


class RestartWithReadTracking(Exception):  # noqa: N818 - no error: the run begins again
    """Request to run the grid again: it writes a buffer after reads that were not recorded."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


class Accesses:
    """All accesses of a grid, numbered from 1."""

    def __init__(self) -> None:
        self.instructions: list[Instruction | None] = [None]
        self.warps = np.zeros(1 << 12, np.int64)
        #: The last access by warp number.
        self.latest: dict[int, int] = {}

    def add(self, instruction: Instruction, warp: int) -> int:
        """Return the number of a new access."""
        number = len(self.instructions)
        self.instructions.append(instruction)
        if number == len(self.warps):
            self.warps = np.concatenate([self.warps, np.zeros(number, np.int64)])
        self.warps[number] = warp
        self.latest[warp] = number
        return number


class UniformWrites:
    """The lanes of a warp that wrote the same to a place in one access: to each of them it is its own write.

    numbers: the access, by place; lanes: a bit for each of them.
    """

    def __init__(self, places: int) -> None:
        self._numbers, self._lanes = np.zeros(places, np.uint32), np.zeros(places, np.uint32)

    def put(self, places: Numbers, number: int, values: Numbers, threads: Numbers, owners: Numbers) -> None:
        """Note which threads left the value of the last one at its place; owners: of a thread, its block."""
        _, first, group = np.unique(places[::-1], return_index=True, return_inverse=True)
        last = (len(places) - 1 - first)[group[::-1]]
        same = (values == values[last]).all(axis=1) & (owners[threads] == owners[threads[last]]) & (threads >= 0)
        places, lanes = places[same], (threads[same] % WARP).astype(np.uint32)
        self._lanes[places[self._numbers[places] != number]] = 0
        self._numbers[places] = number
        np.bitwise_or.at(self._lanes, places, np.uint32(1) << lanes)

    def has(self, places: Numbers, numbers: Numbers, lanes: Numbers) -> Numbers:
        """Return which lanes took part in the writes with these numbers."""
        result: Numbers = self._lanes[places] >> lanes.astype(np.uint32) & np.uint32(1) > 0
        result &= self._numbers[places] == numbers
        return result


class SilentWrites:
    """Writes that race with an earlier write of another thread and leave the same value.

    For each place, keep the number of the last such write and the write that set the value. The latter is
    (access number << 32) + 32 bits that name its thread.
    """

    def __init__(self, places: int) -> None:
        self._numbers, self._origins = np.zeros(places, np.uint32), np.zeros(places, np.uint64)

    def put(self, places: Numbers, number: int, before: Numbers) -> None:
        """Record silent writes; before: the writes that they race with."""
        repeated = self._numbers[places] == before >> _SHIFT
        self._origins[places] = np.where(repeated, self._origins[places], before)
        self._numbers[places] = number

    def origins(self, places: Numbers, writes: Numbers) -> Numbers:
        """Replace each silent write by the write that set its value."""
        return np.where(self._numbers[places] == writes >> _SHIFT, self._origins[places], writes)


class GlobalRecord:
    """The last writers and readers of each word of global memory.

    An entry is (access number << 32) + (lane << 27) + block + 1, or 0 for no access. inputs: allocations that a kernel
    may only read. input_writes: the first write to each input.
    """

    def __init__(
        self, memory: GlobalMemory, tracked: frozenset[str], inputs: Collection[str] = (), scoped: bool = False
    ) -> None:
        self.memory = memory
        self.accesses = Accesses()
        #: Per unit size: words, and bytes for narrower accesses.
        self.writes: dict[int, Numbers] = {}
        self.reads: dict[int, tuple[Numbers, Numbers]] = {}
        #: Per unit size: the lanes of a warp that wrote the same value.
        self.agreeing: dict[int, UniformWrites] = {}
        #: Per unit size: unordered writes that left the same value.
        self.silent: dict[int, SilentWrites] = {}
        #: Per access in which several blocks wrote one value to a place: (place << 32) + block, sorted.
        self.joint: dict[int, Numbers] = {}
        self.atomics: dict[int, Numbers] = {}  # those that changed something
        #: Atomic, volatile, relaxed, acquire and release accesses, by scope and whether they write; only if ``scoped``.
        self.strong: dict[tuple[int, bool], dict[int, Numbers]] = {}
        #: True if some of the accesses have block or cluster scope.
        self.scoped = scoped
        self.dirty: set[int] = set()  # allocations that the launch has written
        self.read: set[int] = set()  # and such that it has read with no record
        self.tracked = {memory.number(name) for name in tracked if name in memory.starts}
        #: True if stores of several values to one place of shared memory are recorded.
        self.records_joint_writes = JOINT_WRITES in tracked
        self.inputs = {memory.number(name) for name in inputs}
        self.input_writes: dict[str, str] = {}
        #: The log of warps that run in lockstep (epochs.py).
        self.epochs: Any = None

    def find_inputs(self, offsets: Numbers, owners: set[int]) -> list[tuple[str, int]]:
        """Return the inputs among the allocations of an access, each with its first element there."""
        names = [self.memory.get_name(owner) for owner in owners & self.inputs]
        spans = [(name, self.memory.starts[name], self.memory.get_end(name)) for name in names]
        return [(name, int(np.flatnonzero((offsets >= a) & (offsets < b))[0])) for name, a, b in spans]

    def last_writes(self, unit: int, atomic: bool = False) -> Numbers:
        """Return the last writes by unit."""
        tables = self.atomics if atomic else self.writes
        if unit not in tables:
            tables[unit] = np.zeros(len(self.memory.data) // unit, np.uint64)
        return tables[unit]

    def find_write(self, offsets: Numbers, size: int) -> tuple[int, str] | None:
        """Return the first element of a non-coherent read of written memory, and the fault in words."""
        for unit, table in self.writes.items():
            result = table[offsets[:, None] // unit + np.arange(max(1, size // unit))].max(axis=1)
            if result.any():
                row = int(np.flatnonzero(result)[0])
                by = self.accesses.instructions[int(result[row] >> np.uint64(32))]
                assert by is not None
                location = self.memory.describe(int(offsets[row]))
                return row, f"a read by ld.global.nc of {location} that was written in this launch at {by.source}"
        return None

    def last_reads(self, unit: int) -> tuple[Numbers, Numbers]:
        """Return the last reads by unit, and the last ones before them by another block."""
        if unit not in self.reads:
            size = len(self.memory.data) // unit
            self.reads[unit] = np.zeros(size, np.uint64), np.zeros(size, np.uint64)
        return self.reads[unit]


class AccessTable:
    """The number of the last access to each unit of shared memory, and its thread; latest: of each warp to any."""

    def __init__(self, unit: int, size: int, warps: int) -> None:
        self.unit = unit
        self.entries = np.zeros(size // unit, np.uint32)
        self.threads = np.zeros(size // unit, np.int32)
        self.latest = [0] * warps
        self.agreeing: UniformWrites | None = None
        self.silent: SilentWrites | None = None

    def put_silent(self, rows: Numbers, size: int, number: int) -> None:
        """Record an access that leaves the values of unordered writes. Call it before ``put``."""
        if self.silent is None:
            self.silent = SilentWrites(len(self.entries))
        places = self._places(rows, size)
        self.silent.put(places, number, self._writes(self.entries[places], self.threads[places]))

    def origins(self, rows: Numbers, size: int) -> tuple[Numbers, Numbers]:
        """Return (elements, units) the numbers and threads of the writes that set the values."""
        places = self._places(rows, size)
        numbers, threads = self.entries[places], self.threads[places]
        if self.silent is not None:
            writes = self.silent.origins(places, self._writes(numbers, threads))
            numbers, threads = writes >> _SHIFT, writes.astype(np.uint32).view(np.int32)
        return numbers.astype(np.int64), threads

    def _places(self, rows: Numbers, size: int) -> Numbers:
        places: Numbers = (rows * size // self.unit)[:, None] + np.arange(max(1, size // self.unit))
        return places

    def _writes(self, numbers: Numbers, threads: Numbers) -> Numbers:
        writes: Numbers = numbers.astype(np.uint64) << _SHIFT | threads.view(np.uint32)
        return writes

    def record_uniform(
        self, rows: Numbers, size: int, number: int, values: Numbers, threads: Numbers, owners: Numbers
    ) -> None:
        """Note which threads of a write that was put left the value of the last one; owners: of a thread, its block."""
        units = size // self.unit
        threads = np.broadcast_to(threads, (len(rows), units))
        if not (self.get_threads(rows, size) != threads).any():
            return
        if self.agreeing is None:
            self.agreeing = UniformWrites(len(self.entries))
        places = self._places(rows, size).ravel()
        self.agreeing.put(places, number, values.reshape(-1, self.unit), threads.ravel(), owners)

    def is_writer(self, rows: Numbers, size: int, numbers: Numbers, threads: Numbers, owners: Numbers) -> Numbers:
        """Return (elements, units):

        whether each thread took part in the last write there, if that write has this number.
        """
        if self.agreeing is None:
            return np.zeros(numbers.shape, np.bool_)
        places = self._places(rows, size)
        same: Numbers = owners[threads] == owners[self.get_threads(rows, size) % len(owners)]
        return same & self.agreeing.has(places, numbers, threads % WARP)

    def latest_other(self, but: int) -> int:
        """Return the latest access of any other warp."""
        return max((n for warp, n in enumerate(self.latest) if warp != but), default=0)

    def put(self, rows: Numbers, size: int, number: int, warp: int, threads: Numbers) -> None:
        """Record an access by a warp's threads (-1: an asynchronous copy) to elements of ``size`` bytes."""
        self.threads.reshape(-1, size // self.unit)[rows] = threads
        view = _VIEWS[size // self.unit]
        self.entries.view(view)[rows] = np.full(size // self.unit, number, np.uint32).view(view)[0]
        self.latest[warp] = number

    def get_threads(self, rows: Numbers, size: int) -> Any:
        """Return (elements, units) threads, as ``get_numbers`` gives the numbers."""
        units = size // self.unit
        if units <= 1:
            return self.threads[rows if units else rows * size // self.unit][:, None]
        return self.threads.reshape(-1, units)[rows]

    def get_numbers(self, rows: Numbers, size: int) -> Any:
        """Return (elements, units) numbers; an element may be a part of a unit, or many."""
        units = size // self.unit
        if units <= 1:
            return self.entries[rows if units else rows * size // self.unit][:, None]
        if units in _VIEWS:
            return self.entries.view(_VIEWS[units])[rows].view(np.uint32).reshape(-1, units)
        quarters = (rows * (units // 4))[:, None] + np.arange(units // 4)
        return self.entries.view(_VIEWS[4])[quarters].view(np.uint32).reshape(-1, units)


class AccessTables(dict[int, AccessTable]):
    """The tables of a machine's shared memory by unit, each made when it is first needed."""

    def __init__(self, size: int, warps: int) -> None:
        super().__init__()
        self._size, self._warps = size, warps

    def __missing__(self, unit: int) -> AccessTable:
        table = self[unit] = AccessTable(unit, self._size, self._warps)
        return table


def group_units(offsets: Numbers, size: int) -> tuple[int, Numbers, int]:
    """Return the unit size of an access in bytes, its element indices, and its element size.

    Neighbouring elements that fill 16 bytes are combined. Threads in a row and matrix fragments access such elements.
    """
    many = _PIECE // size
    if many > 1 and len(offsets) % many == 0:
        first = int(offsets[0])
        if not first % _PIECE and int(offsets[many - 1]) - first == _PIECE - size:
            table = offsets.reshape(-1, many)
            heads = table[:, 0]
            if not int(np.bitwise_or.reduce(heads)) % _PIECE and (table - heads[:, None] == _STEPS[size]).all():
                return WORD, heads >> _SHIFTS[_PIECE], _PIECE
    return WORD if size >= WORD else 1, offsets >> _SHIFTS[size], size


def access_threads(lanes: ThreadSet, count: int) -> Numbers:
    """Return the thread of each element of an access. A thread may have several elements."""
    result = lane_indices(lanes)
    return result if len(result) == count else result[np.arange(count) * len(result) // count]


def threads_by_unit(threads: Numbers, elements: int, units: int) -> Numbers:
    """Return (elements, units or 1) the thread of each unit of an access; -1 where several share one."""
    if len(threads) == elements:
        return threads[:, None]
    table = threads.reshape(elements, max(1, units), -1) if len(threads) % (elements * max(1, units)) == 0 else None
    if table is None:  # fewer threads than units: some of them have several
        return np.repeat(threads, elements * units // len(threads)).reshape(elements, units)
    one: Numbers = table[:, :, 0]
    return np.where((table == one[:, :, None]).all(axis=2), one, -1)


def unit_indices(offsets: Numbers, size: int) -> tuple[int, Numbers]:
    """Return the bytes of a unit, and the (threads, units) of an access."""
    unit = WORD if size >= WORD else 1
    return unit, offsets[:, None] // unit + np.arange(size // unit)


def find_conflicts(offsets: Numbers, values: Numbers, lost: Numbers) -> Iterator[tuple[int, int]]:
    """Yield (last, element) for each element that its own access overwrote with another value."""
    order = np.lexsort((np.arange(len(offsets)), offsets))
    last = dict(zip(offsets[order].tolist(), order.tolist(), strict=True))
    for row in np.flatnonzero(lost.any(axis=1)).tolist():
        winner = last[int(offsets[row])]
        if (values[winner] != values[row]).any():
            yield winner, row


def find_changed(arena: Arena, offsets: Numbers, size: int, values: Numbers) -> Numbers:
    """Return which elements of ``size`` bytes a write changes."""
    before = arena.data[offsets[:, None] + np.arange(size)]
    changed: Numbers = (before != values.reshape(-1, size)).any(axis=1)
    return changed

"""Atomic accesses against ordinary writes to the same place that nothing orders.

An ordinary write may be lost between the read and the write of an atomic access, and the other way round. Only atomic
accesses that changed something count. Compare-and-swap and exchange may meet an earlier ordinary write, as with it a
lock is released; no atomic access is accused for an ordinary read, as many kernels look first and then act atomically.
One whose scope is its block (.cta) is not atomic for other blocks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from greenfast.emulator.machine.records import Tables, places_of, threads_by_unit, units_of

if TYPE_CHECKING:
    from greenfast.emulator.machine.races import Races

Numbers = NDArray[Any]
OF_A_BLOCK = "atomic access with the scope of a block"


class Atomics:
    """The atomic accesses of a machine's threads."""

    def __init__(self, races: Races) -> None:
        self.races = races
        self._shared = Tables(races.m)

    def meet(self, space: str, offsets: Numbers, size: int, narrow: bool, lock: bool) -> None:
        """Threads access ``size`` bytes each atomically: a fault for a racing write, unless it may take a lock.

        narrow: with the scope of a block, and then also for an access of another block: it is not atomic to that one.
        """
        races = self.races
        if space == "global":
            if lock and not narrow:
                return
            tags = races.tags(races.begin(), len(offsets))
            if not lock:
                races.check_global(races.record.writes, offsets, size, tags, "atomic access", "write", None)
            if narrow:
                races.check_global(races.record.atomics, offsets, size, tags, OF_A_BLOCK, "atomic access", None)
        elif lock:
            return
        else:
            floor = races.ordering.floor[races.warp]
            for table in races.shared_writes.values():
                if table.newest(races.warp) > floor:
                    _, rows, whole = units_of(offsets, size)
                    races.check_shared(table, rows, whole, "atomic access", "write", None)

    def record(self, space: str, offsets: Numbers, size: int) -> None:
        """Threads, ``races.accessing``, have changed ``size`` bytes each atomically."""
        races = self.races
        number = races.begin()
        if space == "global":
            unit, places = places_of(offsets, size)
            races.record.table(unit, atomic=True)[places] = races.tags(number, len(offsets))[:, None]
        else:
            unit, rows, whole = units_of(offsets, size)
            threads = threads_by_unit(races.threads(len(offsets)), len(rows), whole // unit)
            self._shared[unit].put(rows, whole, number, races.warp, threads)

    def written(self, rows: Numbers, size: int, values: Numbers | None) -> None:
        """Threads write to shared memory ordinarily: a fault where that meets an atomic access."""
        races = self.races
        for table in self._shared.values():
            if table.newest(races.warp) > races.ordering.floor[races.warp]:
                races.check_shared(table, rows, size, "write", "atomic access", values)

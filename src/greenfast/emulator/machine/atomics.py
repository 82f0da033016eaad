"""Atomic accesses against ordinary writes to the same place that nothing orders.

An ordinary write may be lost between the read and the write of an atomic access, and the other way round. Only atomic
accesses that changed something count. Compare-and-swap and exchange may meet an earlier ordinary write, as with it a
lock is released; no atomic access is accused for an ordinary read, as many kernels look first and then act atomically.
One whose scope is its block (.cta) or cluster is not atomic for threads of others, whatever the scope of theirs is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from greenfast.emulator.machine.access_log import AccessTables, group_units, threads_by_unit, unit_indices
from greenfast.emulator.machine.ordering import BLOCK, CLUSTER, DEVICE

if TYPE_CHECKING:
    from greenfast.emulator.machine.races import Races

Numbers = NDArray[Any]
_SCOPES = {BLOCK: "block-scope", CLUSTER: "cluster-scope", DEVICE: "device-scope"}
_KINDS = {False: "atomic or volatile read", True: "atomic or volatile write"}


class Atomics:
    """The atomic accesses of a machine's threads."""

    def __init__(self, races: Races) -> None:
        self.races = races
        self._shared = AccessTables(races.m)

    def meet(self, space: str, offsets: Numbers, size: int, scope: int, lock: bool) -> None:
        """Threads access ``size`` bytes each atomically: a fault for a racing write, unless it may take a lock.

        scope: within which it is atomic.
        """
        races = self.races
        if space == "global":
            if lock:
                return
            tags = races.tags(races.begin(), len(offsets))
            races.check_global(races.record.writes, offsets, size, tags, "atomic access", "write", None)
        elif lock:
            return
        else:
            floor = races.ordering.floor[races.warp]
            for table in races.shared_writes.values():
                if table.newest(races.warp) > floor:
                    _, rows, whole = group_units(offsets, size)
                    races.check_shared(table, rows, whole, "atomic access", "write", None)

    def check_scopes(self, offsets: Numbers, size: int, scope: int, writes: bool) -> None:
        """Check an atomic, volatile, relaxed, acquire or release access to global memory against such earlier ones.

        Two of them, one of them a write, are a race unless each thread is in the scope of the other's access.
        """
        races, m = self.races, self.races.m
        number = races.begin()
        tags = races.tags(number, len(offsets))
        for (other_scope, other_writes), tables in races.record.strong.items():
            common = min(scope, other_scope)
            if (writes or other_writes) and common < DEVICE and len(m.blocks) > 1:
                what, other = (f"{_SCOPES[s]} {_KINDS[w]}" for s, w in ((scope, writes), (other_scope, other_writes)))
                blocks = 1 if common == BLOCK else m.geometry.cluster_size
                races.check_global(tables, offsets, size, tags, what, other, None, blocks)
        if writes and scope < DEVICE:
            self._check_lockstep(offsets, scope, number)
        unit, places = unit_indices(offsets, size)
        tables = races.record.strong.setdefault((scope, writes), {})
        if unit not in tables:
            tables[unit] = np.zeros(len(m.memory.data) // unit, np.uint64)
        tables[unit][places] = tags[:, None]

    def _check_lockstep(self, offsets: Numbers, scope: int, number: int) -> None:
        """A fault where threads beyond each other's scope write to one place in the same instruction."""
        races, m = self.races, self.races.m
        blocks = m.block_of[races.threads(len(offsets))] // (1 if scope == BLOCK else m.geometry.cluster_size)
        order = np.lexsort((blocks, offsets))
        same, apart = np.diff(offsets[order]) == 0, np.diff(blocks[order]) != 0
        for at in np.flatnonzero(same & apart):
            first, second = (int(races.threads(len(offsets))[row]) for row in order[at : at + 2])
            what, place = f"{_SCOPES[scope]} {_KINDS[True]}", m.memory.describe(int(offsets[order[at]]))
            raise races.fault(what, what, number, place, int(m.blocks[m.block_of[first]]), second)

    def record(self, space: str, offsets: Numbers, size: int) -> None:
        """Threads, ``races.accessing``, have changed ``size`` bytes each atomically."""
        races = self.races
        number = races.begin()
        if space == "global":
            unit, places = unit_indices(offsets, size)
            races.record.table(unit, atomic=True)[places] = races.tags(number, len(offsets))[:, None]
        else:
            unit, rows, whole = group_units(offsets, size)
            threads = threads_by_unit(races.threads(len(offsets)), len(rows), whole // unit)
            self._shared[unit].put(rows, whole, number, races.warp, threads)

    def written(self, rows: Numbers, size: int, values: Numbers | None) -> None:
        """Threads write to shared memory ordinarily: a fault where that meets an atomic access."""
        races = self.races
        for table in self._shared.values():
            if table.newest(races.warp) > races.ordering.floor[races.warp]:
                races.check_shared(table, rows, size, "write", "atomic access", values)

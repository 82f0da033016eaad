"""Old values that atomic and volatile reads may return, because memory is weakly ordered.

A volatile, relaxed or acquire read takes part in no race. It returns any value that is not known to be out of date:
without a fence between two volatile writes, another thread may see the second one first (PTX ISA, "Memory Consistency
Model"). In some orders of the warps, the first read of a place by a warp therefore returns the value before the last
write, unless the write is ordered before the read. The next read returns the new value.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from greenfast.emulator.machine.blocks import BlockState, ThreadSet
from greenfast.emulator.machine.memory import Bytes
from greenfast.emulator.machine.ordering import Ordering
from greenfast.emulator.machine.warp_sync import WarpSync

Numbers = NDArray[Any]


@dataclass(frozen=True)
class _Write:
    """The last atomic or volatile write to a place: its access number, its thread and the previous value."""

    number: int
    lane: int
    before: Bytes


class StaleReads:
    """Places with an old value that reads may return."""

    def __init__(self, m: BlockState, ordering: Ordering, warp_sync: WarpSync) -> None:
        self.m, self.ordering, self.warp_sync = m, ordering, warp_sync
        self._writes: dict[tuple[str, int], _Write] = {}
        #: Per place, block and warp: the last write that its threads have seen.
        self._seen: dict[tuple[str, int, int, int], int] = {}

    def write(self, space: str, offsets: Numbers, before: Bytes, lanes: ThreadSet) -> None:
        """Record a write by the latest access; before: (threads, size) the previous values."""
        number = self.ordering.now
        for offset, lane, old in zip(offsets.tolist(), self._threads(lanes).tolist(), before, strict=True):
            known = self._writes.get((space, offset))
            if known is None or known.number != number:
                self._writes[space, offset] = _Write(number, lane, old.copy())

    def read(self, space: str, offsets: Numbers, values: Bytes, lanes: ThreadSet, newest: bool = False) -> Bytes:
        """Return the values read, (threads, size); newest: an atomic operation, so the last value written."""
        if not self._writes:
            return values
        result, blocks = values, self.m.block_of
        for row, (offset, lane) in enumerate(zip(offsets.tolist(), self._threads(lanes).tolist(), strict=True)):
            last = self._writes.get((space, offset))
            if last is None or last.lane == lane:  # a thread reads its own write before others can
                continue
            key = (space, offset, int(blocks[lane]), lane // self.m.threads_per_warp_slot)
            if self._seen.get(key) == last.number:
                continue
            self._seen[key] = last.number
            if not newest and len(last.before) == values.shape[1] and not self._knows(lane, last):
                result = values.copy() if result is values else result
                result[row] = last.before
        return result

    def _knows(self, lane: int, write: _Write) -> bool:
        """Return whether a write is ordered before the thread's current access."""
        m, ordering = self.m, self.ordering
        block, other = int(m.block_of[lane]), int(m.block_of[write.lane])
        if block != other:
            return ordering.through_memory and bool(ordering.blocks[block, other] >= write.number)
        warp, by = lane // m.threads_per_warp_slot, write.lane // m.threads_per_warp_slot
        if warp != by:
            return bool(ordering.warps[block, warp, by] >= write.number)
        here, there = np.array([lane]), np.array([write.lane])
        return not self.warp_sync.unordered(np.array([write.number]), here, there)[0]

    def _threads(self, lanes: ThreadSet) -> Numbers:
        return np.arange(self.m.lanes)[lanes]

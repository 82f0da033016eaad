"""The device memory of a running program: a mapping that the program shares, with a state per byte."""

from __future__ import annotations

import mmap
import os
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from greenfast.emulator.grid import WORKSPACE
from greenfast.emulator.machine.memory import NO_ALLOCATION, OUTSIDE, UNWRITTEN, WRITTEN, Bytes, GlobalMemory

#: Kinds of allocations, as in cudart.c.
DEVICE, PINNED, MANAGED = range(3)
#: The function that makes each kind.
MAKERS = {DEVICE: "cudaMalloc", PINNED: "cudaMallocHost", MANAGED: "cudaMallocManaged"}
#: Allocations begin at a page, because those that host code may access are opened page by page.
_PAGE = 4096
#: Unallocated bytes between allocations.
_GAP = 1 << 16
#: Freed bytes. Their addresses are not given out again, so that an access after cudaFree is found.
_QUARANTINE = 256 << 20


@dataclass
class DeviceAllocation:
    """An allocation. caller: the address of the call that made it; 0 for a variable."""

    name: str
    start: int
    size: int
    kind: int
    caller: int = 0
    freed: bool = False


class DeviceMemory(GlobalMemory):
    """All allocations of a program. Addresses are the program's own. file: the descriptor of the shared memory."""

    def __init__(self, capacity: int) -> None:
        super().__init__({})
        self.capacity = capacity
        self.file = os.memfd_create("greenfast-device-memory")
        os.ftruncate(self.file, capacity)
        self._bytes = np.frombuffer(mmap.mmap(self.file, capacity), np.uint8)
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
        self._states = np.frombuffer(mmap.mmap(-1, capacity, flags=flags), np.uint8)
        self.allocations: list[DeviceAllocation] = []
        self._free: dict[int, list[int]] = {}
        self._freed_bytes = 0
        self._end = _GAP
        self._count = 0
        #: Returns the source line of a call in the program, "" if it is not known.
        self.resolve: Callable[[int], str] = lambda address: ""
        self.allocate(8, DEVICE, name=WORKSPACE)
        self.get_states(WORKSPACE)[:] = WRITTEN

    def allocate(self, size: int, kind: int, caller: int = 0, name: str = "") -> DeviceAllocation | None:
        """Return a new allocation; None if memory is full."""
        if not name:
            self._count += 1
            name = f"allocation {self._count}"
        reusable = self._free.get(size, []) if self._freed_bytes > _QUARANTINE else []
        if reusable:
            index = reusable.pop(0)
            start = self.allocations[index].start
            made = self.allocations[index] = DeviceAllocation(name, start, size, kind, caller)
            self._freed_bytes -= size
            self._rename()
        else:
            start = self._end
            if start + size + _GAP > self.capacity:
                return None
            self._end = -(-(start + size + _GAP) // _PAGE) * _PAGE
            made = DeviceAllocation(name, start, size, kind, caller)
            self.allocations.append(made)
            self.starts[name], self.sizes[name] = start, size
            self._list.append(start)
            self.begins = np.array(self._list, np.int64)
            self.size = self._end
            self.data, self.state = self._bytes[: self._end], self._states[: self._end]
        # Host code may write to the others at any time.
        self.state[start : start + size] = WRITTEN if kind in (PINNED, MANAGED) else UNWRITTEN
        return made

    def free(self, allocation: DeviceAllocation) -> None:
        """End an allocation."""
        allocation.freed = True
        self.state[allocation.start : allocation.start + allocation.size] = OUTSIDE
        self._free.setdefault(allocation.size, []).append(self.allocations.index(allocation))
        self._freed_bytes += allocation.size

    def _rename(self) -> None:
        self.starts = {a.name: a.start for a in self.allocations}
        self.sizes = {a.name: a.size for a in self.allocations}

    def find(self, address: int, size: int = 1) -> DeviceAllocation | None:
        """Return the live allocation that holds ``size`` bytes at an address; None if no allocation does."""
        offset = address - self.base
        index = bisect_right(self._list, offset) - 1
        if index < 0:
            return None
        a = self.allocations[index]
        return a if not a.freed and a.start <= offset and offset + size <= a.start + a.size else None

    def used(self) -> int:
        """Return the bytes of all live allocations."""
        return sum(a.size for a in self.allocations if not a.freed)

    def describe(self, offset: int) -> str:
        """Describe an offset: its position in, before or after an allocation, and the call that made the allocation."""
        text = super().describe(offset)
        if text == NO_ALLOCATION:
            return text
        name = text.split("'")[1]
        a = next(a for a in reversed(self.allocations) if a.name == name)
        line = self.resolve(a.caller) if a.caller else ""
        made = f", from {MAKERS[a.kind]} at {line}" if line else f", from {MAKERS[a.kind]}" if a.caller else ""
        return text + made + (", which was freed" if a.freed else "")

    def save(self) -> list[tuple[slice, Bytes, Bytes]]:
        """Return the contents and states of all live allocations."""
        spans = [slice(a.start, a.start + a.size) for a in self.allocations if not a.freed]
        return [(span, self.data[span].copy(), self.state[span].copy()) for span in spans]

    def restore(self, saved: list[tuple[slice, Bytes, Bytes]]) -> None:
        """Restore contents from ``save``."""
        self.poisoned = False
        for span, data, state in saved:
            self.data[span], self.state[span] = data, state

    def contents(self) -> dict[str, NDArray[np.uint8]]:
        """Return the contents of live allocations by name; bytes that nothing has written are 0xFF."""
        result = {}
        for a in self.allocations:
            if not a.freed:
                span = slice(a.start, a.start + a.size)
                result[a.name] = np.where(self.state[span] == UNWRITTEN, np.uint8(0xFF), self.data[span])
        return result

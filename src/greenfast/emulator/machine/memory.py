"""Global and shared memory that track which bytes are allocated and written.

Both are byte arrays with a state per byte. A read or write out of bounds, of an uninitialised byte, or of a byte that
an asynchronous copy has not delivered is reported at the access.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

#: State of a byte: outside of every allocation, allocated and never written, written, being copied to, of an mbarrier,
#: of a variable that the module begins with another value, left by an earlier launch and not yet written in this one,
#: of an mbarrier that nothing has used since mbarrier.init, which may be overwritten (Triton 3.6 allocates data there).
OUTSIDE, UNWRITTEN, WRITTEN, IN_FLIGHT, BARRIER, LEFT, UNUSED_BARRIER = range(7)

#: How the reason of a BadAccessError for a read of UNWRITTEN bytes ends.
UNWRITTEN_READ = "of an element that nothing has written"

#: Description of an address far from every allocation.
NO_ALLOCATION = "in no allocation"

#: Bytes that asynchronous reads lock together.
CHUNK = 16

#: Start addresses of the windows in the generic address space. A window is larger than its contents. No program's code,
#: heap, stack or libraries are there: global memory can be mapped at its address in a process (emulator/cuda).
GLOBAL_BASE = 0x2000_0000_0000
SHARED_BASE = 0x1F00_0000_0000
LOCAL_BASE = 0x1E00_0000_0000
PARAM_BASE = 0x1D00_0000_0000
#: Addresses of functions, outside of all memory.
FUNCTION_BASE = 0x1C00_0000_0000
BASES = {"global": GLOBAL_BASE, "shared": SHARED_BASE, "local": LOCAL_BASE, "param": PARAM_BASE}
#: A window is 2^39 bytes, at a multiple of its size.
WINDOW_BITS = 39

#: Unallocated bytes between allocations; an index that is off by less than this hits none of another array.
_GAP = 1 << 16
#: A register that nothing has written, as an address.
_UNSET = -1

Bytes = NDArray[np.uint8]
Addresses = NDArray[np.int64]


@dataclass(frozen=True)
class BadAccessError(Exception):
    """An access that failed: why, and the position in the access's arrays of the first lane at fault."""

    reason: str
    position: int
    address: int


_SHIFTS = {1 << n: n for n in range(5)}


def window(address: int) -> str:
    """Return the state space of a generic address: global, shared, local, param or none."""
    return next((name for name, base in BASES.items() if base >> WINDOW_BITS == address >> WINDOW_BITS), "none")


def explain_pointer(address: int) -> str:
    """Explain an address near 0 or -1 as a null or uninitialised pointer; return "" for other addresses.

    Offsets are mostly multiples of 4: 63 is -1 with an offset, 64 is 0 with an offset.
    """
    if not -_GAP <= address < _GAP:
        return ""
    if address < 0 or address & 3 == 3:
        offset = "" if address == _UNSET else " with an offset"
        return f" (address {address & 2**64 - 1:#x}: -1{offset}, as of a register that nothing has written)"
    return f" (address {address:#x}: a null pointer{' with an offset' if address else ''})"


def elements(data: Bytes, size: int) -> NDArray[Any]:
    """View bytes as elements of ``size`` bytes: NumPy gathers numbers much faster than rows of bytes."""
    return data.view(np.complex128 if size == 16 else f"u{size}")


@cache
def _state(state: int, size: int) -> Any:
    """Return the element with this state in every byte."""
    return elements(np.full(size, state, np.uint8), size)[0]


class Arena:
    """A byte array with a state per byte. Addresses are offsets into it.

    An access is ``count`` addresses of ``size`` bytes each (1, 2, 4, 8 or 16), aligned to their size. ``readers``: for
    each 16 bytes, the number of asynchronous operations that still read them; None if the kernel has no such operation.
    ``on_read``, ``on_write``: called before an access with offsets, size and the values to write. ``on_generic``:
    called for synchronous accesses with offsets, whether they write, and whether ``on_read`` or ``on_write`` was
    called. ``writes``: the number of writes; of atomic writes, and of all writes with ``compares``, only those that
    change a value.
    """

    def __init__(self, size: int, state: int) -> None:
        padded = -(-size // 16) * 16
        self.size = size
        self.poisoned = False
        self.one_writer = False
        self.data = np.zeros(padded, np.uint8)
        self.state = np.full(padded, state, np.uint8)
        self.state[size:] = OUTSIDE
        self.readers: NDArray[np.uint16] | None = None
        self.writes = 0
        self.compares = False
        self.on_read: Callable[[Addresses, int], None] | None = None
        self.on_write: Callable[[Addresses, int, Bytes | None], None] | None = None
        self.on_generic: Callable[[Addresses, bool, bool], None] | None = None

    def fill_unwritten(self, poison: int) -> None:
        """Let reads of bytes that nothing has written give ``poison``, in place of a fault."""
        self.data[:] = poison
        self.poisoned = True

    def watch_asynchronous_reads(self) -> None:
        """Track reads by asynchronous operations."""
        self.readers = np.zeros(len(self.data) // CHUNK, np.uint16)

    def _rows(self, offsets: Addresses, size: int, access: str) -> NDArray[np.int64]:
        """Return element indices. Raise BadAccessError for misaligned and out-of-bounds elements."""
        if size > 1 and int(np.bitwise_or.reduce(offsets)) & (size - 1):
            i = int(np.flatnonzero(offsets & (size - 1))[0])
            raise BadAccessError(f"misaligned {access}", i, int(offsets[i]))
        if len(offsets) and int(offsets.view(np.uint64).max()) > self.size - size:  # a negative one is large
            i = int(np.flatnonzero((offsets < 0) | (offsets > self.size - size))[0])
            raise BadAccessError(f"{access} out of bounds", i, int(offsets[i]))
        return offsets >> _SHIFTS[size]

    def _require(self, rows: NDArray[np.int64], offsets: Addresses, size: int, access: str) -> None:
        """Raise BadAccessError unless every byte of a read is WRITTEN."""
        if (elements(self.state, size)[rows] == _state(WRITTEN, size)).all():
            return
        states = self.state.reshape(-1, size)[rows]
        wrong = (states != WRITTEN) & (states != UNWRITTEN) if self.poisoned else states != WRITTEN
        if not wrong.any():
            return
        i = int(np.flatnonzero(wrong.any(axis=1))[0])
        worst = states[i]
        if (worst == OUTSIDE).any():
            reason = f"{access} out of bounds"
        elif (worst == IN_FLIGHT).any():
            reason = f"{access} of data that an asynchronous copy has not delivered (no wait for it)"
        elif ((worst == BARRIER) | (worst == UNUSED_BARRIER)).any():
            reason = f"{access} of an mbarrier"
        elif (worst == LEFT).any():
            reason = f"{access} of what an earlier launch left"
        else:
            reason = f"{access} {UNWRITTEN_READ}"
        raise BadAccessError(reason, i, int(offsets[i]))

    def read(
        self, offsets: Addresses, size: int, access: str, atomic: bool = False, asynchronous: bool = False
    ) -> Bytes:
        """Return (count, size) bytes; every byte must have been written. ``atomic``: it takes part in no race."""
        rows = self._rows(offsets, size, access)
        self._require(rows, offsets, size, access)
        if self.on_read is not None and not atomic and len(offsets):
            self.on_read(offsets, size)
        if self.on_generic is not None and not asynchronous:
            self.on_generic(offsets, False, not atomic)
        return elements(self.data, size)[rows].view(np.uint8).reshape(-1, size)

    def write(self, offsets: Addresses, values: Bytes, access: str, atomic: bool = False) -> None:
        """Write (count, size) bytes; where two lanes write one place, the last one stays."""
        size = values.shape[1]
        rows = self.require_free(offsets, size, access)
        if self.on_write is not None and not atomic and len(offsets):
            self.on_write(offsets, size, values)
        new = elements(np.ascontiguousarray(values).reshape(-1), size)
        if not self.compares or not np.array_equal(elements(self.data, size)[rows].view(np.uint8), new.view(np.uint8)):
            self.writes += 1
        cells = elements(self.data, size)
        cells[rows] = new
        if self.one_writer and not atomic:
            left = cells[rows]
            if left.tobytes() != new.tobytes():
                i = int(np.flatnonzero(left.view(np.uint8) != new.view(np.uint8))[0]) // size
                raise BadAccessError(
                    f"{access} of different values to one place by several threads in one instruction",
                    i,
                    int(offsets[i]),
                )
        elements(self.state, size)[rows] = _state(WRITTEN, size)
        if self.on_generic is not None:
            self.on_generic(offsets, True, not atomic)

    def require_free(self, offsets: Addresses, size: int, access: str) -> NDArray[np.int64]:
        """Return the indices of elements that may be overwritten now. Raise BadAccessError for others."""
        rows = self._rows(offsets, size, access)
        before = elements(self.state, size)[rows]
        if not ((before == _state(WRITTEN, size)) | (before == _state(UNWRITTEN, size))).all():
            self._refuse_write(rows, offsets, size, access)
        if self.readers is not None:
            read = self.readers[offsets // CHUNK] > 0
            if read.any():
                i = int(np.flatnonzero(read)[0])
                raise BadAccessError(f"{access} to where an asynchronous operation still reads", i, int(offsets[i]))
        return rows

    def _refuse_write(self, rows: NDArray[np.int64], offsets: Addresses, size: int, access: str) -> None:
        """Raise BadAccessError for the first element that may not be written, if there is one."""
        states = self.state.reshape(-1, size)[rows]
        bad = ((states == OUTSIDE) | (states == IN_FLIGHT) | (states == BARRIER)).any(axis=1)
        if not bad.any():
            return
        i = int(np.flatnonzero(bad)[0])
        reason = f"{access} out of bounds"
        if (states[i] == IN_FLIGHT).any():
            reason = f"{access} to where an asynchronous copy has not delivered (no wait for it)"
        elif (states[i] == BARRIER).any():
            reason = f"{access} over an mbarrier (no mbarrier.inval)"
        raise BadAccessError(reason, i, int(offsets[i]))

    def place(self, offsets: Addresses, values: Bytes) -> None:
        """Write (count, size) bytes that an asynchronous copy delivers to places that were marked for it."""
        size = values.shape[1]
        rows = offsets >> _SHIFTS[size]
        elements(self.data, size)[rows] = elements(np.ascontiguousarray(values).reshape(-1), size)
        elements(self.state, size)[rows] = _state(WRITTEN, size)

    def mark(self, offsets: Addresses, size: int, state: int, access: str) -> None:
        """Set the state of elements that must exist."""
        rows = self._rows(offsets, size, access)
        elements(self.state, size)[rows] = _state(state, size)


class GlobalMemory(Arena):
    """All allocations of a run in one arena, with gaps between them. Addresses are generic, from ``base`` up."""

    def __init__(self, sizes: dict[str, int], base: int = GLOBAL_BASE) -> None:
        self.base = base
        starts, end = {}, _GAP
        for name, size in sizes.items():
            starts[name] = end
            end = -(-(end + size + _GAP) // 512) * 512
        super().__init__(end, OUTSIDE)
        self.one_writer = True
        self.starts = starts
        self.sizes = dict(sizes)
        for name, start in starts.items():
            self.state[start : start + sizes[name]] = UNWRITTEN

        self.begins = np.array(list(starts.values()), np.int64)
        self._owners: NDArray[np.uint32] | None = None
        self._list = self.begins.tolist()

    def number(self, name: str) -> int:
        """Return the number of an allocation, in their order."""
        return list(self.starts).index(name)

    def get_name(self, number: int) -> str:
        """Return the name of an allocation."""
        return list(self.starts)[number]

    def owners(self, offsets: Addresses) -> set[int]:
        """Return the numbers of the allocations that contain the offsets."""
        low = bisect_right(self._list, int(offsets.min())) - 1
        if low == bisect_right(self._list, int(offsets.max())) - 1:
            return {low}
        return set((np.searchsorted(self.begins, offsets, "right") - 1).tolist())

    def find_owners(self, shift: int) -> NDArray[np.uint32]:
        """Return the number of the allocation that holds each piece of 2^shift bytes; they begin at a piece."""
        count = (len(self.data) >> shift) + 1
        if self._owners is None or len(self._owners) != count:
            pieces = np.arange(count, dtype=np.int64) << shift
            owners = np.maximum(np.searchsorted(self.begins, pieces, "right") - 1, 0)
            self._owners = owners.astype(np.uint32)
        return self._owners

    def address(self, name: str) -> int:
        """Return the generic address of an allocation."""
        return self.base + self.starts[name]

    def get_end(self, name: str) -> int:
        """Return the end offset of an allocation."""
        return self.starts[name] + self.sizes[name]

    def get_bytes(self, name: str) -> Bytes:
        """Return an allocation's bytes, as a view."""
        return self.data[self.starts[name] : self.get_end(name)]

    def get_states(self, name: str) -> Bytes:
        """Return the states of an allocation's bytes, as a view."""
        return self.state[self.starts[name] : self.get_end(name)]

    def fill(self, name: str, content: bytes) -> None:
        """Set all bytes of an allocation before a launch."""
        self.get_bytes(name)[:] = np.frombuffer(content, np.uint8)
        self.get_states(name)[:] = WRITTEN

    def describe(self, offset: int) -> str:
        """Describe an offset: its position in, before or after an allocation."""
        for name, start in self.starts.items():
            size = self.sizes[name]
            if start <= offset < start + size:
                return f"byte {offset - start} of {name!r} ({size} bytes)"
            if start + size <= offset < start + size + _GAP // 2:
                return f"{offset - start - size} bytes past the end of {name!r} ({size} bytes)"
            if start - _GAP // 2 <= offset < start:
                return f"{start - offset} bytes in front of {name!r}"
        return NO_ALLOCATION

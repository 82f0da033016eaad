"""Asynchronous operations in flight: bulk copies, and matrix products of warpgroups."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from greenfast.emulator.machine.memory import CHUNK, WRITTEN, Arena
from greenfast.emulator.ptx.syntax import Instruction

ThreadSet = Any  # a slice, or sorted indices
#: Number of product groups per warp for which the first access number is kept.
GROUPS = 8
#: Number of products after which products that are no chunk's last reader are forgotten.
_KEPT = 512


@dataclass
class BulkLoad:
    """Copies to shared memory that one instruction began; ``land`` delivers them.

    mbarriers: the rows of shared memory with the mbarriers at which the copies arrive.
    """

    lanes: NDArray[np.intp]
    mbarriers: NDArray[np.int64]
    instruction: Instruction
    land: Callable[[], None]


@dataclass
class BulkStore:
    """Copies from shared to global memory that one instruction began, a row of each array per copy.

    lanes: their threads. groups: the bulk groups that they belong to. chunks: of shared memory that they read. offsets:
    of the chunks of global memory that they write, -1 for none. values: (copies, chunks, bytes of a chunk).
    """

    lanes: NDArray[np.intp]
    groups: NDArray[np.int64]
    chunks: NDArray[np.int64]
    offsets: NDArray[np.int64]
    values: NDArray[np.uint8]
    instruction: Instruction
    reading: NDArray[np.bool_] = field(init=False)
    landed: NDArray[np.bool_] = field(init=False)

    def __post_init__(self) -> None:
        self.reading = np.ones(len(self.lanes), np.bool_)
        self.landed = np.zeros(len(self.lanes), np.bool_)

    def release(self, shared: Arena, selected: NDArray[np.bool_]) -> None:
        """Mark the sources of the copies as read."""
        release(shared, self.chunks[selected & self.reading])
        self.reading &= ~selected

    def settle(self, memory: Arena, offsets: NDArray[np.int64], values: NDArray[np.uint8]) -> None:
        """Write the chunks that another store of the same chunk size also writes with equal values."""
        size = self.values.shape[2]
        present = (self.offsets >= 0) & ~self.landed[:, None]
        own = self.offsets[present]
        common, mine, other = np.intersect1d(own, offsets, return_indices=True)
        if values.shape[1] == size and (self.values[present][mine] == values[other]).all():
            memory.data.reshape(-1, size)[common // size] = values[other]
            memory.state.reshape(-1, size)[common // size] = WRITTEN

    def land(self, memory: Arena, selected: NDArray[np.bool_]) -> None:
        """Write the data of the copies."""
        now = selected & ~self.landed
        present = (self.offsets >= 0) & now[:, None]
        size = self.values.shape[2]
        rows = self.offsets[present] // size
        memory.data.reshape(-1, size)[rows] = self.values[present]
        memory.state.reshape(-1, size)[rows] = WRITTEN
        self.landed |= now


def hold(shared: Arena, chunks: NDArray[np.int64]) -> None:
    """Forbid overwriting chunks of shared memory, each of them CHUNK bytes; a chunk may be held many times."""
    assert shared.readers is not None
    np.add.at(shared.readers, chunks.ravel(), 1)


def release(shared: Arena, chunks: NDArray[np.int64]) -> None:
    """Undo one ``hold``."""
    assert shared.readers is not None
    np.subtract.at(shared.readers, chunks.ravel(), 1)


def chunk_indices(offsets: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the chunk index of each offset in shared memory."""
    return offsets // CHUNK


@dataclass
class Guard:
    """A register that matrix products use, per thread.

    writes, reads: the groups of the latest products that write it and read it. touched: the number of the wgmma.fence
    that must come before the next product uses it.
    """

    writes: NDArray[np.int64]
    reads: NDArray[np.int64]
    touched: NDArray[np.int64]


@dataclass
class MatrixReads:
    """Shared memory that one wgmma reads, for the blocks in ``blocks``; chunks: a row per block.

    groups: (4, blocks) the group of each warp. open: (blocks,) whether no warp has waited for it.
    """

    blocks: NDArray[np.intp]
    chunks: NDArray[np.int64]
    groups: NDArray[np.int64]
    open: NDArray[np.bool_]
    warpgroup: int
    waited: ProductWaits


@dataclass
class ProductWaits:
    """The waits for one wgmma; numbers: (4, blocks), the access number of each warp's wait, 0 for none."""

    instruction: Instruction
    blocks: NDArray[np.intp]
    numbers: NDArray[np.int64]


class Products:
    """The wgmma products in flight. Groups are counted from 1 per thread; those up to ``done`` have been waited for.

    fences: how many wgmma.fence each thread has executed. guards: by register. before: (warps of all blocks, GROUPS)
    the latest access to memory before each of a warp's last groups was committed.
    """

    def __init__(self, lanes: int, registers: Iterable[str]) -> None:
        self.lanes = lanes
        self.committed = np.zeros(lanes, np.int64)
        self.done = np.zeros(lanes, np.int64)
        self.fences = np.zeros(lanes, np.int64)
        self.before = np.zeros((lanes // 32, GROUPS), np.int64)
        self.guards: dict[str, Guard] = {}
        self.reads: list[MatrixReads] = []
        #: Per warpgroup and chunk of shared memory: the last product that reads the chunk, counted from 1; and the
        #: waits for it.
        self.readers: dict[int, NDArray[np.int32]] = {}
        self.waited: dict[int, ProductWaits] = {}
        self._issued = 0
        for name in registers:
            self.guard(name)

    def add(self, reads: MatrixReads, chunks: int) -> None:
        """Record the reads of a product. ``chunks``: the number of chunks of shared memory."""
        self.reads.append(reads)
        self._issued += 1
        if self._issued % _KEPT == 0:
            last = np.unique(np.concatenate([np.unique(numbers) for numbers in self.readers.values()]))
            self.waited = {number: self.waited[number] for number in last.tolist() if number}
        self.waited[self._issued] = reads.waited
        if reads.warpgroup not in self.readers:
            self.readers[reads.warpgroup] = np.zeros(chunks, np.int32)
        self.readers[reads.warpgroup][reads.chunks] = self._issued

    def guard(self, name: str) -> Guard:
        """Return the guard of a register; a register without one gets one."""
        result = self.guards.get(name)
        if result is None:
            result = self.guards[name] = Guard(*np.zeros((3, self.lanes), np.int64))
        return result

    def unreadable(self, name: str, lanes: ThreadSet) -> NDArray[np.intp]:
        """Return positions in ``lanes`` of threads with a pending product write to the register."""
        guard = self.guards.get(name)
        if guard is None:
            return _NONE
        return (guard.writes[lanes] > self.done[lanes]).nonzero()[0]

    def unwritable(self, name: str, lanes: ThreadSet) -> NDArray[np.intp]:
        """Return positions in ``lanes`` of threads with a pending product read or write of the register."""
        guard = self.guards.get(name)
        if guard is None:
            return _NONE
        return (np.maximum(guard.writes[lanes], guard.reads[lanes]) > self.done[lanes]).nonzero()[0]


_NONE = np.zeros(0, np.intp)

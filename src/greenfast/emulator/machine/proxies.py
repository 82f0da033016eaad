"""Accesses to shared memory through the generic and the asynchronous proxy, and the fences required between them.

Bulk copies and wgmma access shared memory through the asynchronous proxy, all other instructions through the generic
proxy. If an asynchronous access follows a generic access to the same place, and one of them writes, a fence.proxy.async
is required on the synchronization path between them. It may be executed by the first thread, or by a thread that
synchronizes with it. After an asynchronous access, its completion includes an implicit fence. The implicit fence of a
wgmma covers only earlier reads of its warps. A wgmma needs no proxy fence for data that cp.async copied.
docs/emulator-details.md, "Fences between proxies", has the reasons.

For each chunk of 16 bytes, the last generic write and the last generic read of each warp are kept. A fence counts for
all threads of its warp. In a cluster of several blocks it counts for its whole block, and reads are not kept.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from greenfast.emulator.machine.blocks import BlockState, ThreadSet
from greenfast.emulator.machine.memory import CHUNK
from greenfast.emulator.machine.races import Races
from greenfast.emulator.ptx.syntax import Instruction

Numbers = NDArray[Any]
#: Shift from a byte offset to a chunk index.
_SHIFT = CHUNK.bit_length() - 1
WRITES, READS = 0, 1
_BOTH, _READS = slice(WRITES, READS + 1), slice(READS, READS + 1)
_NAMES = ("store", "load")


class Proxies:
    """The generic accesses to a machine's shared memory, by the numbers that races.py gives them."""

    def __init__(self, machine: BlockState, races: Races) -> None:
        self.m, self.races, self.ordering = machine, races, races.ordering
        self._chunks = len(machine.shared.data) // CHUNK
        self._writes = np.zeros(self._chunks, np.uint32)
        self._reads: dict[int, Numbers] = {}
        #: [writes or reads, warp]: the last one, of any chunk.
        self._last = np.zeros((2, machine.warps), np.int64)
        #: In clusters: per block, the last access before a fence.
        self._fences = np.zeros(len(machine.blocks), np.int64)

    def record_access(self, offsets: Numbers, writes: bool, counted: bool) -> None:
        """Record a generic access of a warp's threads; ``counted``: the access already has a number."""
        warp = self.races.warp
        number = self.ordering.now if counted else self.races.begin()
        if writes:
            self._write(offsets, warp, number)
            return
        if warp not in self._reads:
            self._reads[warp] = np.zeros(self._chunks, np.uint32)
        self._reads[warp][offsets >> _SHIFT] = number
        self._last[READS, warp] = number

    def record_cp_async(self, offsets: Numbers, lanes: Numbers, instruction: Instruction) -> None:
        """Record the arrival of cp.async copies of a warp; cp.async uses the generic proxy."""
        warp = int(lanes[0]) // self.m.threads_per_warp_slot
        self.ordering.now = self.races.record.accesses.add(instruction, warp)
        self._write(offsets, warp, self.ordering.now)

    def _write(self, offsets: Numbers, warp: int, number: int) -> None:
        self._writes[offsets >> _SHIFT] = number
        self._last[WRITES, warp] = number

    def clear_writes(self, offsets: Numbers) -> None:
        """Forget generic writes that a bulk copy has overwritten."""
        self._writes[offsets >> _SHIFT] = 0

    def fence(self, lanes: ThreadSet) -> None:
        """Execute fence.proxy.async for threads of a warp."""
        blocks = np.unique(self.m.block_of[lanes])
        self._fences[blocks] = self.ordering.now
        self.ordering.fence_proxy(blocks, self.races.warp, self.ordering.now, _BOTH)

    def fence_products(self, lanes: Numbers, until: Numbers) -> None:
        """Warps, a thread of each, have waited for products; until: the last access before each one's was committed."""
        self.ordering.fence_proxy(self.m.block_of[lanes], lanes // self.m.threads_per_warp_slot, until, _READS)

    def require_fenced(self, offsets: Numbers, warps: Numbers, access: str, writes: bool) -> None:
        """Report a generic access without a later proxy fence, before these asynchronous accesses.

        offsets: of the asynchronous accesses, each in its own chunk. warps: the accessing warps; each must be
        ordered after the fence.
        """
        self._require(WRITES, self._writes, offsets, warps, access)
        for reads in self._reads.values() if writes else ():
            self._require(READS, reads, offsets, warps, access)

    def _require(self, kind: int, table: Numbers, offsets: Numbers, warps: Numbers, access: str) -> None:
        proxied = self.ordering.proxied
        if proxied is None:
            if not self._last[kind].any():
                return
        elif (self._last[kind] <= proxied[:, warps, kind].min(axis=(0, 1))).all():
            return
        result = table[offsets >> _SHIFT]
        index = result.nonzero()[0]
        if not len(index):
            return
        numbers, blocks = result[index].astype(np.int64), offsets[index] // self.m.shared_stride
        by = self.races.record.accesses.warps[numbers]
        if proxied is None:
            known = self._fences[blocks]
        else:
            known = proxied[blocks[:, None], warps, kind, by[:, None]].min(axis=1)
        bad = np.flatnonzero(numbers > known)
        if len(bad) and self.m.current.name == "wgmma":
            wrote = self.races.record.accesses.instructions
            bad = np.array([n for n in bad.tolist() if getattr(wrote[numbers[n]], "name", "") != "cp"], np.int64)
        if len(bad):
            self._accuse(kind, int(index[bad[0]]), int(numbers[bad[0]]), offsets, warps, access)

    def _accuse(self, kind: int, index: int, number: int, offsets: Numbers, warps: Numbers, access: str) -> None:
        m, offset, before = self.m, int(offsets[index]), _NAMES[kind]
        location, lane = m.describe_shared(offset), int(self.races.threads(len(offsets))[index])
        block, accesses = offset // m.shared_stride, self.races.record.accesses
        by, earlier = int(accesses.warps[number]), accesses.instructions[number]
        assert earlier is not None
        where = f"the {before} at {earlier.place} (in: {earlier.short_text}) by warp {by} of "
        where += m.block_name(int(m.blocks[block]))
        if self.ordering.proxied is not None and number > int(self.ordering.warps[block, warps, by].min()):
            raise m.fault(f"a data race on {location}: nothing orders this {access} and {where}, found", lane)
        did = "over what a load read" if kind == READS else "of what a store wrote"
        if kind == WRITES and access == "bulk write":
            did = "over what a store wrote"
        m.report_formal(
            "no-proxy-fence",
            f"{access} {did} with no fence.proxy.async since: {location}, {where}; a barrier orders threads, not "
            f"proxies: put the fence after the {before}, before the barrier or arrival that follows it; found",
            lane,
        )

"""Redundant loads: several threads of a block load one address, and one of them uses the value.

For example, Triton's ``store(p, load(p) + x)`` of a scalar loads in all threads and stores in one. This race is
harmless because the other threads discard their values.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from greenfast.emulator.machine.blocks import BlockState, ThreadSet
from greenfast.emulator.machine.memory import Arena, Bytes
from greenfast.emulator.ptx.syntax import Instruction

_Numbers = NDArray[np.int64]
_NOBODY = np.iinfo(np.int64).max


class RedundantLoads:
    """Loads of one address by several threads of a block. All threads except the owner receive a poison value.

    fill: the poison byte. With None, all threads receive the stored value, these loads take part in no race, and the
    addresses of all loads and stores are recorded. Then ``choose_writers`` or ``choose_lowest`` chooses the owner of
    each address per block. Loads by owners take part in races.
    """

    def __init__(self) -> None:
        self.fill: int | None = None
        self._loads: list[Instruction] = []
        #: Per recorded load: (block << address bits) + address, and the threads.
        self._loaded: list[tuple[_Numbers, _Numbers]] = []
        #: The same for stores.
        self._stored: list[tuple[_Numbers, _Numbers]] = []
        self._places = self._owners = np.empty(0, np.int64)

    def add(self, load: Instruction) -> bool:
        """Add a load. Return False if it was added before, or reads shared memory."""
        new = not self.contains(load) and not any(part.startswith("shared") for part in load.parts)
        self._loads.append(load)
        self._loaded.clear()
        self._stored.clear()
        return new

    def choose_lowest(self) -> None:
        """Choose the lowest loading thread of the block as the owner of each address."""
        self._places, self._owners = _lowest(self._loaded)

    def choose_writers(self) -> None:
        """Choose the lowest storing thread as the owner of each address; without stores, the lowest loading one."""
        self.choose_lowest()
        written, writers = _lowest(self._stored)
        if len(written) and len(self._places):
            index = np.minimum(np.searchsorted(written, self._places), len(written) - 1)
            self._owners = np.where(written[index] == self._places, writers[index], self._owners)

    def contains(self, i: Instruction) -> bool:
        """Return whether an instruction is a redundant load."""
        return any(i is load for load in self._loads)

    def begin(self, launch: int, machine: BlockState) -> None:
        """Start to record stores before the blocks begin, unless there is a poison value."""
        if self.fill is not None:
            return
        told = machine.memory.on_write

        def stored(offsets: _Numbers, size: int, values: Bytes | None) -> None:
            threads = np.arange(machine.lanes)[machine.access_lanes]
            if len(threads) == len(offsets):
                places = machine.blocks[machine.block_of[threads]] * len(machine.memory.data) + offsets
                numbers = machine.thread_of[threads]
                self._stored += [(places + byte, numbers) for byte in range(size)]
            if told is not None:
                told(offsets, size, values)

        machine.memory.on_write = stored

    def end(self, launch: int, machine: BlockState) -> None:
        """Do nothing after the blocks have ended."""

    def read(self, m: BlockState, arena: Arena, offsets: _Numbers, size: int, access: str, lanes: ThreadSet) -> Bytes:
        """Load values for threads from global memory, poisoned for all except the owners."""
        threads = np.arange(m.lanes)[lanes]
        places, numbers = m.blocks[m.block_of[threads]] * len(arena.data) + offsets, m.thread_of[threads]
        with m.accessing(threads, "global"):
            result = arena.read(offsets, size, access, True)
        if self.fill is None:
            self._loaded.append((places, numbers))
            return result
        index = np.minimum(np.searchsorted(self._places, places), len(self._places) - 1)
        owns = (self._places[index] == places) & (self._owners[index] == numbers)
        if owns.any():
            with m.accessing(threads[owns], "global"):
                arena.read(offsets[owns], size, access)
        return np.where(owns[:, None], result, np.uint8(self.fill))


def _lowest(seen: list[tuple[_Numbers, _Numbers]]) -> tuple[_Numbers, _Numbers]:
    """Return the addresses in order, and the lowest thread of each."""
    if not seen:
        return np.empty(0, np.int64), np.empty(0, np.int64)
    places, threads = map(np.concatenate, zip(*seen, strict=True))
    unique, index = np.unique(places, return_inverse=True)
    lowest = np.full(len(unique), _NOBODY)
    np.minimum.at(lowest, index, threads)
    return unique, lowest

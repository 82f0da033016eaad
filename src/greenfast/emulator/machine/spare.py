"""Loads of one place by several threads of a block, of which one needs the value.

Where a block reads, changes and writes back a number, as Triton's ``store(p, load(p) + x)`` of a scalar does, all of
its threads load and one stores. That is a race, and harmless: what the other threads got is thrown away.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from greenfast.emulator.machine.memory import Arena, Bytes

if TYPE_CHECKING:
    from greenfast.emulator.machine.state import Lanes, Machine
    from greenfast.emulator.ptx.syntax import Instruction


class Spare:
    """Some loads. Of a block's threads that load a place by them, all but the lowest get what must not matter.

    fill: the byte that they get; None to look which thread is the lowest, while all get what is there. These loads take
    no part in races then, and later those of the lowest threads do.
    """

    def __init__(self) -> None:
        self.fill: int | None = None
        self._loads: list[Instruction] = []
        #: Of each load that was looked at the place, with the block's number above it, and the thread.
        self._seen: list[tuple[NDArray[np.int64], NDArray[np.int64]]] = []
        self._places = self._lowest = np.empty(0, np.int64)

    def add(self, load: Instruction) -> bool:
        """Take a load in; whether it is a new one, and not of shared memory."""
        new = not self.asks(load) and not any(part.startswith("shared") for part in load.parts)
        self._loads.append(load)
        self._seen.clear()
        return new

    def disturb(self, fill: int) -> None:
        """From now on all but the lowest threads get this byte."""
        if self.fill is None and self._seen:
            places, threads = map(np.concatenate, zip(*self._seen, strict=True))
            self._places, at = np.unique(places, return_inverse=True)
            self._lowest = np.full(len(self._places), np.iinfo(np.int64).max)
            np.minimum.at(self._lowest, at, threads)
        self.fill = fill

    def asks(self, i: Instruction) -> bool:
        """Whether an instruction is one of these loads."""
        return any(i is load for load in self._loads)

    def begin(self, launch: int, machine: Machine) -> None:
        """Before blocks begin."""
        machine.spare = self

    def end(self, launch: int, machine: Machine) -> None:
        """After blocks have ended."""

    def read(self, m: Machine, arena: Arena, offsets: NDArray[np.int64], size: int, what: str, lanes: Lanes) -> Bytes:
        """What threads get from global memory."""
        threads = np.arange(m.lanes)[lanes]
        places, numbers = m.blocks[m.block_of[threads]] * len(arena.data) + offsets, m.thread_of[threads]
        with m.accessing(threads, "global"):
            found = arena.read(offsets, size, what, True)
        if self.fill is None:
            self._seen.append((places, numbers))
            return found
        at = np.minimum(np.searchsorted(self._places, places), len(self._places) - 1)
        lowest = (self._places[at] == places) & (self._lowest[at] == numbers)
        if lowest.any():
            with m.accessing(threads[lowest], "global"):
                arena.read(offsets[lowest], size, what)
        return np.where(lowest[:, None], found, np.uint8(self.fill))

"""The mbarrier objects of some blocks: phase, pending arrivals and pending transaction bytes of each.

Facts: PTX ISA, "mbarrier".
A phase completes when no arrival and no byte is pending; the next one begins with the expected count of arrivals.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Rows = NDArray[np.int64]

#: Arrivals are counted in 20 bits, and so are bytes of transactions to either side of zero.
MOST_ARRIVALS = (1 << 20) - 1
MOST_BYTES = (1 << 20) - 1

#: The state that an arrival returns: the phase, over the pending arrivals.
PHASE_SHIFT = 20
PENDING = np.uint64(MOST_ARRIVALS)


class MbarrierError(Exception):
    """An illegal mbarrier operation: the reason, and the position of its row in the operation."""

    def __init__(self, reason: str, position: int) -> None:
        super().__init__(reason)
        self.reason, self.position = reason, position


class Mbarriers:
    """All 8-byte words of shared memory as mbarriers.

    live: the initialised mbarriers. visible: the mbarriers that a fence or a barrier has made visible to bulk copies.
    ``changes`` counts events that may unblock a waiting thread. ``on_complete`` is called with the mbarriers that
    complete a phase.
    """

    def __init__(self, words: int) -> None:
        self.live = np.zeros(words, np.bool_)
        self.visible = np.zeros(words, np.bool_)
        self._hidden = False  # whether any may not be
        self.expected = np.zeros(words, np.int64)
        self.pending = np.zeros(words, np.int64)
        self.bytes = np.zeros(words, np.int64)
        self.phase = np.zeros(words, np.int64)
        self.changes = 0
        self.on_complete: Callable[[Rows], None] | None = None

    def init(self, rows: Rows, counts: NDArray[np.int64]) -> None:
        """Begin phase 0 of new mbarriers."""
        _first(~((counts >= 1) & (counts <= MOST_ARRIVALS)), f"an arrival count outside of 1 to {MOST_ARRIVALS}")
        self.live[rows] = True
        self.visible[rows] = False
        self._hidden = True
        self.expected[rows] = self.pending[rows] = counts
        self.bytes[rows] = self.phase[rows] = 0
        self.changes += 1

    def require(self, rows: Rows) -> None:
        """Raise MbarrierError unless all of them are initialised."""
        _first(~self.live[rows], "no mbarrier is initialised here")

    def expect(self, rows: Rows, count: NDArray[np.int64]) -> None:
        """Add to the pending bytes of the phase; a negative count subtracts delivered bytes."""
        np.add.at(self.bytes, rows, count)
        _first(np.abs(self.bytes[rows]) > MOST_BYTES, f"more than {MOST_BYTES} bytes of transactions pending")
        self._settle(rows)

    def show(self, indices: NDArray[np.int64], blocks: int) -> None:
        """Make the mbarriers of some blocks (by number, out of ``blocks``) visible to bulk copies."""
        if self._hidden:
            self.visible.reshape(blocks, -1)[indices] = True
            self._hidden = not self.visible[self.live].all()

    def state(self, rows: Rows) -> NDArray[np.uint64]:
        """Return the opaque state of each now."""
        return (self.phase[rows] << PHASE_SHIFT | self.pending[rows]).astype(np.uint64)

    def await_more(self, rows: Rows) -> None:
        """Wait for one arrival more in this phase, for each of ``rows``."""
        np.add.at(self.pending, rows, 1)
        _first(self.pending[rows] > MOST_ARRIVALS, f"more than {MOST_ARRIVALS} arrivals pending")

    def arrive(self, rows: Rows, counts: NDArray[np.int64], drop: bool = False) -> None:
        """Count arrivals; ``drop``: also reduce the expected arrivals of later phases."""
        unique, inverse = np.unique(rows, return_inverse=True)
        left = np.bincount(inverse, weights=counts, minlength=len(unique)).astype(np.int64)
        if drop:
            self.expected[unique] -= left
        while left.any():
            taken = np.minimum(left, self.pending[unique])
            over = (left > 0) & (taken == 0)
            _first(over[inverse], "more arrivals than the phase expects, while it waits for bytes of transactions")
            self.pending[unique] -= taken
            left -= taken
            self._settle(unique)
        self.changes += 1

    def _settle(self, rows: Rows) -> None:
        """Begin the next phase of each complete mbarrier."""
        done = np.unique(rows[(self.pending[rows] == 0) & (self.bytes[rows] == 0)])
        if len(done):
            if self.on_complete is not None:
                self.on_complete(done)
            self.phase[done] += 1
            self.pending[done] = self.expected[done]
            self.changes += 1

    def passed(self, rows: Rows, parity: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return whether the last phase of that parity is complete."""
        result: NDArray[np.bool_] = (self.phase[rows] & 1) != parity
        return result

    def describe(self, row: int) -> str:
        """Describe the pending arrivals and bytes of an mbarrier."""
        if not self.live[row]:
            return "not initialised"
        left, missing = int(self.pending[row]), int(self.bytes[row])
        waits = f"pending: {left} of {int(self.expected[row])} arrivals, {missing} bytes of transactions"
        if missing < 0:
            waits += " (more came than were expected)"
        return f"in phase {int(self.phase[row])}, {waits}"


def _first(bad: NDArray[np.bool_], reason: str) -> None:
    if bad.any():
        raise MbarrierError(reason, int(np.flatnonzero(bad)[0]))

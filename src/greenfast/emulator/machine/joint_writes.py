"""Stores to shared memory in which several threads of a warp write different values to one place.

One of the values remains (CUDA C++ Programming Guide, "SIMT Architecture"). Reductions rely on it: threads hold the
same sum, rounded differently, and in Triton's reductions several warps store such sums to one place. In every order of
the warps one of the same values remains, so this is no race.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.int64]

#: The name under which a launch restarts to record such stores (Program.tracked).
JOINT_WRITES = "stores of several values to one place of shared memory"


class JointWrites:
    """The last such store of each place."""

    def __init__(self) -> None:
        self._last: dict[int, tuple[int, frozenset[bytes]]] = {}

    def record(self, number: int, rows: Numbers, size: int, values: NDArray[np.uint8]) -> None:
        """Record the places of a store that get several values; rows: places in elements of ``size`` bytes."""
        for row, written in _find_several(rows, values.reshape(-1, size)).items():
            self._last[row * size] = number, written

    def agree(self, row: int, size: int, number: int, rows: Numbers, values: NDArray[np.uint8]) -> bool:
        """Return whether a store and the earlier access ``number`` write the same several values to a row."""
        earlier = self._last.get(row * size)
        if earlier is None or earlier[0] != number:
            return False
        return earlier[1] == {value.tobytes() for value in values.reshape(-1, size)[rows == row]}


def _find_several(rows: Numbers, values: NDArray[np.uint8]) -> dict[int, frozenset[bytes]]:
    """Return the rows that get several values, with these."""
    order = np.argsort(rows, kind="stable")
    ordered, contents = rows[order], values[order]
    differs = (ordered[1:] == ordered[:-1]) & (contents[1:] != contents[:-1]).any(axis=1)
    return {
        int(row): frozenset(value.tobytes() for value in values[rows == row]) for row in np.unique(ordered[1:][differs])
    }

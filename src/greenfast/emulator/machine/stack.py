"""The stacks of threads that call recursive functions."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


class Stack:
    """Call stacks of all threads: the depth, the return addresses and the saved values."""

    def __init__(self, lanes: int) -> None:
        self.depth = np.zeros(lanes, np.int64)
        self.returns: list[NDArray[np.int64]] = []
        self.saved: list[dict[str, NDArray[Any]]] = []

    def push(self, lanes: NDArray[np.intp], pc: int) -> None:
        """Push a return address."""
        depths = self.depth[lanes]
        while len(self.returns) <= int(depths.max()):
            self.returns.append(np.zeros(len(self.depth), np.int64))
        for depth in np.unique(depths):
            self.returns[depth][lanes[depths == depth]] = pc
        self.depth[lanes] += 1

    def pop(self, lanes: NDArray[np.intp]) -> NDArray[np.int64]:
        """Pop the return addresses."""
        self.depth[lanes] -= 1
        result = np.zeros(len(lanes), np.int64)
        for depth in np.unique(self.depth[lanes]):
            here = self.depth[lanes] == depth
            result[here] = self.returns[depth][lanes[here]]
        return result

    def slot(self, depth: int, name: str, like: NDArray[Any], width: int) -> NDArray[Any]:
        """Return the storage of a register (width 0) or of a variable of ``width`` bytes at a depth."""
        while len(self.saved) <= depth:
            self.saved.append({})
        slots = self.saved[depth]
        if name not in slots:
            shape = (len(self.depth), width) if width else (len(self.depth),)
            slots[name] = np.zeros(shape, like.dtype)
        return slots[name]

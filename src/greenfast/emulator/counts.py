"""Deterministic counts of what a kernel executes."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from greenfast.emulator.ptx import SourceLine

WARP = 32
BANKS = 32
SECTOR = 32


@dataclass
class Counts:
    """Counts over all blocks that ran.

    instructions: warps that executed an instruction, by opcode (its first words). threads: threads that did.
    matrix_flops: multiply and add counted as two. sectors: 32-byte pieces of global memory touched, per warp access.
    bank_conflicts: extra passes over shared memory beyond the fewest that the access width needs, by source line.
    """

    instructions: Counter[str] = field(default_factory=Counter)
    threads: Counter[str] = field(default_factory=Counter)
    matrix_flops: int = 0
    exponentials: int = 0
    barriers: int = 0
    global_load_bytes: int = 0
    global_store_bytes: int = 0
    global_load_sectors: int = 0
    global_store_sectors: int = 0
    shared_load_bytes: int = 0
    shared_store_bytes: int = 0
    shared_passes: int = 0
    bank_conflicts: Counter[str] = field(default_factory=Counter)
    _patterns: dict[bytes, int] = field(default_factory=dict)

    def access(
        self,
        space: str,
        store: bool,
        offsets: NDArray[np.int64],
        warps: NDArray[np.int64],
        size: int,
        source: SourceLine | None,
    ) -> None:
        """Count one access: byte offsets and warp numbers of its threads, sorted by warp; ``size`` bytes each."""
        total = len(offsets) * size
        if space == "global":
            sectors = self._sectors(offsets, warps, size)
            if store:
                self.global_store_bytes += total
                self.global_store_sectors += sectors
            else:
                self.global_load_bytes += total
                self.global_load_sectors += sectors
        elif space == "shared":
            if store:
                self.shared_store_bytes += total
            else:
                self.shared_load_bytes += total
            self.shared_passes += self._shared_passes(offsets, warps, size, str(source))

    @staticmethod
    def _sectors(offsets: NDArray[np.int64], warps: NDArray[np.int64], size: int) -> int:
        first = offsets // SECTOR
        keys = warps * (1 << 40) + first
        if size > 1 and ((offsets + size - 1) // SECTOR != first).any():
            keys = np.concatenate([keys, warps * (1 << 40) + (offsets + size - 1) // SECTOR])
        return len(np.unique(keys))

    def _shared_passes(self, offsets: NDArray[np.int64], warps: NDArray[np.int64], size: int, source: str) -> int:
        """Passes over shared memory: a pass serves each bank once, and any number of threads that want its word.

        Accesses of 8 and 16 bytes are served in halves and quarters of a warp, as the hardware does.
        """
        words = offsets >> 2
        parts = max(1, size // 4)
        lane_order = np.arange(len(offsets))
        boundaries = np.flatnonzero(np.diff(warps)) + 1
        passes = conflicts = 0
        for group in np.split(lane_order, boundaries):
            key = (words[group] - words[group[0]] // BANKS * BANKS).tobytes() + bytes([size])
            found = self._patterns.get(key)
            if found is None:
                found = self._patterns[key] = _passes(words[group], parts)
            fewest = -(-len(group) * max(size, 4) // 128) if size > 4 else 1
            passes += found
            conflicts += max(0, found - fewest)
        if conflicts:
            self.bank_conflicts[source] += conflicts
        return passes


def _passes(words: NDArray[np.int64], parts: int) -> int:
    """Passes of one warp's access of ``parts`` words per thread."""
    total = 0
    step = WARP // parts
    for start in range(0, len(words), step):
        wanted = np.unique((words[start : start + step, None] + np.arange(parts)).ravel())
        total += int(np.bincount(wanted % BANKS).max())
    return total

"""Deterministic counts of executed instructions and memory accesses."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from greenfast.emulator.machine.blocks import WARP, ThreadSet, are_whole_warps, lane_indices
from greenfast.emulator.ptx.syntax import SourceLine
from greenfast.spec.facts import KernelCounts

BANKS = 32
SECTOR = 32

#: (words relative to the first thread's, bytes per thread) -> (passes, conflicts) of a warp's access to shared memory.
_PATTERNS: dict[tuple[bytes, int], tuple[int, int]] = {}


@dataclass
class Counts:
    """Counts over all blocks that ran.

    instructions: warps that executed an instruction, by opcode (its first words). threads: threads that did.
    matrix_instructions: warps that executed a matrix product; matrix_flops: multiply and add counted as two.
    barriers: warps that arrived at one. sectors: 32-byte sectors of global memory touched, per warp access.
    conflicts: passes over shared memory beyond the fewest that the access width needs. shared_bytes, bank_conflicts:
    of loads and stores by source line.
    """

    instructions: Counter[str] = field(default_factory=Counter)
    threads: Counter[str] = field(default_factory=Counter)
    matrix_instructions: int = 0
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
    shared_load_conflicts: int = 0
    shared_store_conflicts: int = 0
    shared_bytes: Counter[str] = field(default_factory=Counter)
    bank_conflicts: Counter[str] = field(default_factory=Counter)

    def matrix(self, products: int, flops: int) -> None:
        """Count matrix products of as many warps, each of ``flops``."""
        self.matrix_instructions += products
        self.matrix_flops += products * flops

    def access(
        self,
        space: str,
        store: bool,
        offsets: NDArray[np.int64],
        threads: ThreadSet,
        size: int,
        source: SourceLine | None,
    ) -> None:
        """Count one access of ``size`` bytes per thread: byte offsets and sorted numbers of its threads.

        A slice holds whole warps.
        """
        if not len(offsets):
            return
        first, second = 0, 0
        if space == "global":
            first = _sectors(offsets, threads, size)
        elif space == "shared":
            first, second = _shared(offsets >> 2, threads, size)
        self.add_access(space, store, len(offsets) * size, first, second, source)

    def add_access(
        self, space: str, store: bool, total: int, passes: int, conflicts: int, source: SourceLine | None
    ) -> None:
        """Count accesses of ``total`` bytes; passes: over shared memory, or the touched sectors of global memory."""
        if space == "global":
            if store:
                self.global_store_bytes += total
                self.global_store_sectors += passes
            else:
                self.global_load_bytes += total
                self.global_load_sectors += passes
        elif space == "shared":
            self.shared_passes += passes
            self.shared_bytes[str(source)] += total
            if store:
                self.shared_store_bytes += total
                self.shared_store_conflicts += conflicts
            else:
                self.shared_load_bytes += total
                self.shared_load_conflicts += conflicts
            if conflicts:
                self.bank_conflicts[str(source)] += conflicts

    def add(self, other: Counts) -> None:
        """Add other counts to these."""
        for f in fields(self):
            mine, more = getattr(self, f.name), getattr(other, f.name)
            if isinstance(mine, Counter):
                mine.update(more)
            else:
                setattr(self, f.name, mine + more)

    def record(self) -> KernelCounts:
        """Return the counts as a record holds them, the most frequent first."""
        values: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self)}
        for name, value in values.items():
            if isinstance(value, Counter):
                values[name] = dict(value.most_common())
        del values["threads"]
        return KernelCounts(**values)


def _sectors(offsets: NDArray[np.int64], threads: ThreadSet, size: int) -> int:
    """Return how many sectors each warp touches, in sum."""
    first = offsets // SECTOR
    if isinstance(threads, slice) and SECTOR % size == 0:  # then aligned elements are in one sector each
        rows = first.reshape(-1, WARP)
        steps = np.diff(rows, axis=1)
        if (steps < 0).any():
            steps = np.diff(np.sort(rows, axis=1), axis=1)
        return len(rows) + int(np.count_nonzero(steps))
    warps = lane_indices(threads) // WARP
    keys = warps * (1 << 40) + first
    last = (offsets + size - 1) // SECTOR
    if (last != first).any():
        keys = np.concatenate([keys, warps * (1 << 40) + last])
    return len(np.unique(keys))


def _shared(words: NDArray[np.int64], threads: ThreadSet, size: int) -> tuple[int, int]:
    """Return the passes over shared memory of one access by some warps, and the conflicts among them.

    Most often all warps are whole and access one pattern, each at a different place: it is counted once.
    """
    if len(words) % WARP == 0 and are_whole_warps(threads):
        rows = words.reshape(-1, WARP)
        relative = rows - rows[:, :1]  # moving all words of a warp by as much keeps its conflicts
        if not (relative == relative[0]).all():
            return _total(_passes(rows, size))
        key = relative[0].tobytes(), size
        result = _PATTERNS.get(key)
        if result is None:
            result = _PATTERNS[key] = _total(_passes(rows[:1], size))
        return result[0] * len(rows), result[1] * len(rows)
    threads = lane_indices(threads)
    warps = threads // WARP
    table = np.full((int(warps[-1]) + 1, WARP), -1, np.int64)
    table[warps, threads % WARP] = words
    return _total(_passes(table, size))


def _total(passes: NDArray[np.int64]) -> tuple[int, int]:
    """Return passes and conflicts of all parts of warps: a part with a thread needs one pass."""
    return int(passes.sum()), int(np.maximum(passes - 1, 0).sum())


def _passes(words: NDArray[np.int64], size: int) -> NDArray[np.int64]:
    """Return the passes of each part of each warp's access; words: (warps, 32), the first per thread, -1 for none.

    A pass serves one word of each bank, to any number of threads. Accesses of 8 and 16 bytes are served in
    halves and quarters of a warp, as the hardware does.
    """
    parts = max(1, size // 4)
    wanted = words[:, :, None] + np.arange(parts)
    wanted = np.sort(np.where(words[:, :, None] < 0, -1, wanted).reshape(-1, WARP), axis=1)
    new = wanted >= 0
    new[:, 1:] &= wanted[:, 1:] != wanted[:, :-1]
    part = np.broadcast_to(np.arange(len(wanted))[:, None], wanted.shape)
    banks = np.bincount(part[new] * BANKS + wanted[new] % BANKS, minlength=len(wanted) * BANKS)
    return np.asarray(banks.reshape(-1, BANKS).max(axis=1))

"""Happens-before between the warps of a block and between blocks, as vector clocks.

Accesses are numbered in execution order. Each warp has a vector clock: for each warp of its block, the number up to
which its accesses happened before. Each block has one vector clock for the other blocks. Barriers and mbarriers join
clocks within a block. Between blocks, and through flags and locks, clocks pass through atomic, volatile, acquire and
release accesses. A write stores the clock of the last fence of its warp (to other blocks: of its block); a release
stores the current clock. A read joins the stored clock. Fences and accesses have a scope: block, cluster or device. An
ordinary write counts as a release if another thread polls it in this way.

Each warp has two more clocks, for accesses that also precede a fence of the asynchronous proxy (see proxies.py). The
fence copies the first clock to them, and they are joined with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.int64]
#: Clock value after all accesses.
EVERYTHING = np.iinfo(np.int64).max


#: Scopes of accesses and fences, from narrow to wide. Wider scopes than the device count as the device.
BLOCK, CLUSTER, DEVICE = 0, 1, 2


def parse_scope(parts: Sequence[str]) -> int:
    """Return the scope of a strong access or fence; volatile accesses, and such without a scope, have the widest."""
    return BLOCK if "cta" in parts else CLUSTER if "cluster" in parts else DEVICE


@dataclass
class _Late:
    """Clocks (32,) of another warp's lanes that a warp knows, and that some of its threads have not passed on.

    until: the other warp's accesses that would count as known without this record.
    """

    until: int
    lanes: Numbers


@dataclass
class _SyncWord:
    """A word through which threads synchronize, and the clocks that were stored there.

    blocks: the clock for all blocks. clusters: per cluster, the clock for its blocks. warps: per block, the clock for
    its warps. lanes: per block and warp, the clock of its lanes. foreign: per block, the clocks that its warps stored
    for other warps.
    """

    version: int = 0
    blocks: Any = 0
    clusters: dict[int, Numbers] = field(default_factory=dict)
    warps: dict[int, Numbers] = field(default_factory=dict)
    lanes: dict[tuple[int, int], Numbers] = field(default_factory=dict)
    foreign: dict[int, Numbers] = field(default_factory=dict)


def _join(table: dict[Any, Numbers], key: Any, known: Numbers) -> None:
    """Join a clock into a table."""
    before = table.get(key)
    table[key] = known if before is None else np.maximum(before, known)


class Ordering:
    """The knowledge of the warps and blocks that run together. ``through_memory``: whether any is passed on there."""

    def __init__(
        self, blocks: int, warps: int, through_memory: bool, proxies: bool = False, cluster_size: int = 1
    ) -> None:
        """``proxies``: whether to keep the clocks of proxy fences."""
        self.through_memory, self.cluster_size = through_memory, cluster_size
        self._clocks = np.zeros((blocks, warps, 3 if proxies else 1, warps), np.int64)
        #: [block, warp, warp of the block]: the latter's accesses up to this number happened before the former's next
        #: access.
        self.warps = self._clocks[:, :, 0]
        self.warps[:, range(warps), range(warps)] = EVERYTHING
        #: [block, warp, writes or reads, warp of the block]: the same, for accesses that a proxy fence follows.
        self.proxied = self._clocks[:, :, 1:] if proxies else None
        #: Per warp number: the minimum over blocks and over the other warps.
        self.min_clock = [EVERYTHING if warps == 1 and cluster_size == 1 else 0] * warps
        self.now = 0
        count = blocks if through_memory else 0
        #: [block, block]; by scope of the fence, as it was at each block's last one.
        self.blocks = np.zeros((count, count), np.int64)
        self.fenced = {CLUSTER: np.zeros((count, count), np.int64), DEVICE: np.zeros((count, count), np.int64)}
        #: [block, warp, warp of the block]: the clock of each warp at its last fence of any scope.
        self.fenced_warps = np.zeros((count, warps, warps), np.int64)
        self._words: dict[tuple[str, int], _SyncWord] = {}
        self._seen: dict[tuple[int, int, str, int], int] = {}
        self._barriers: dict[int, Numbers] = {}
        self._mbarriers: dict[int, Numbers] = {}
        #: In clusters, by mbarrier: the clock for all blocks.
        self._mbarriers_of_clusters: dict[int, Numbers] = {}
        #: By mbarrier and arriving warp: (32,) the clocks of its lanes, if threads arrived without the others.
        self._partial: dict[int, dict[int, Numbers]] = {}
        #: By block and warp, then by other warp: lanes of the latter that it does not know as it knows the warp.
        self.late: dict[tuple[int, int], dict[int, _Late]] = {}

    def snapshot(self, block: int, warp: int) -> Numbers:
        """Return (clocks, warps): the clock that a warp passes to other warps of its block."""
        known: Numbers = self._clocks[block, warp].copy()
        known[0, warp] = self.now  # in place of everything
        return known

    def join(self, block: int, warp: int, known: Numbers) -> None:
        """Join a clock into the clock of a warp."""
        mine = self._clocks[block, warp]
        np.maximum(mine, known, out=mine)
        late = self.late.get((block, warp), {})
        for other in list(late):
            if known[0, other] >= late[other].until:
                del late[other]

    def fence_proxy(self, blocks: Any, warps: Any, until: Any, kinds: slice) -> None:
        """Execute proxy fences of warps, for writes or reads ordered before them, up to the access ``until``."""
        if self.proxied is not None:
            known = np.minimum(self.warps[blocks, warps], np.asarray(until)[..., None])[..., None, :]
            self.proxied[blocks, warps, kinds] = np.maximum(self.proxied[blocks, warps, kinds], known)

    def update_min(self, warps: NDArray[np.intp]) -> None:
        """Recompute the minimum clocks of the warps."""
        count = self.warps.shape[1]
        for warp in warps.tolist():
            self.min_clock[warp] = int(self.warps[:, warp].min()) if count > 1 else EVERYTHING
        if self.cluster_size > 1:
            clusters = np.arange(len(self.blocks)) // self.cluster_size
            least = int(self.blocks[(clusters[:, None] == clusters) & ~np.eye(len(clusters), dtype=bool)].min())
            self.min_clock = [min(known, least) for known in self.min_clock]
        for (_, warp), others in self.late.items():
            least = min((int(late.lanes.min()) for late in others.values()), default=EVERYTHING)
            self.min_clock[warp] = min(self.min_clock[warp], least)

    # ---- barriers of a block ----------------------------------------------------------------------------------------

    def arrive(self, keys: list[int], blocks: list[int], warp: int) -> None:
        """Arrive at barriers without waiting, for a warp of some blocks; ``keys``: one barrier in each block."""
        for key, block in zip(keys, blocks, strict=True):
            known = self.snapshot(block, warp)
            before = self._barriers.get(key)
            self._barriers[key] = known if before is None else np.maximum(before, known)

    def complete_barriers(self, waiting: dict[int, tuple[int, list[int]]]) -> None:
        """Complete barriers; ``waiting``: by barrier, the block and its waiting warps."""
        for key, (block, warps) in waiting.items():
            known = self._barriers.pop(key, np.zeros(1, np.int64))
            for warp in warps:
                known = np.maximum(known, self.snapshot(block, warp))
            for warp in warps:
                self.join(block, warp, known)
        self.update_min(np.unique([warp for _, warps in waiting.values() for warp in warps]))

    def sync_blocks(self, blocks: NDArray[np.int64]) -> None:
        """Synchronize all warps of some blocks at a barrier of the whole block."""
        own = np.arange(self.warps.shape[1])
        if self.proxied is not None:
            self.proxied[blocks] = self.proxied[blocks].max(axis=1, keepdims=True)
        self.warps[blocks] = self.now
        self.warps[blocks[:, None], own, own] = EVERYTHING
        for block, warp in list(self.late) if len(blocks) else ():
            if block in blocks:
                del self.late[block, warp]
        self.update_min(own)

    def sync_cluster(self, blocks: NDArray[np.int64], until: int) -> None:
        """Synchronize the warps of a cluster at its barrier, up to the access ``until``."""
        self.warps[blocks] = np.maximum(self.warps[blocks], until)
        self.update_min(np.arange(self.warps.shape[1]))
        if self.through_memory:
            self.blocks[blocks] = self.blocks[blocks].max(axis=0)
            among = np.ix_(blocks, blocks)
            self.blocks[among] = np.maximum(self.blocks[among], until)

    # ---- mbarriers --------------------------------------------------------------------------------------------------

    def release(self, row: int, block: int, warp: int, relaxed: bool = False, lanes: Numbers | None = None) -> None:
        """Release at an mbarrier arrival; relaxed: release the clock of the last fence.

        lanes: (32,) the clocks of the warp's lanes if threads arrive without the others.
        """
        known = self.snapshot(block, warp)
        if relaxed:
            known[0] = self.fenced_warps[block, warp] if self.through_memory else 0
        before = self._mbarriers.get(row)
        partial = self._partial.get(row, {})
        if lanes is None and not relaxed:
            partial.pop(warp, None)
        elif lanes is not None:
            earlier = partial[warp] if warp in partial else np.full(32, 0 if before is None else before[0, warp])
            self._partial.setdefault(row, {})[warp] = np.maximum(earlier, lanes)
        self._mbarriers[row] = known if before is None else np.maximum(before, known)
        if self.cluster_size > 1:
            passed_on = self.blocks[block].copy()
            passed_on[block] = self.now
            _join(self._mbarriers_of_clusters, row, passed_on)

    def arrived_clock(self, row: int, warp: int) -> int:
        """Return the clock component of a warp that the arrivals at an mbarrier have stored."""
        known = self._mbarriers.get(row)
        return 0 if known is None else int(known[0, warp])

    def acquire(self, row: int, block: int, warp: int) -> Numbers:
        """Acquire after an mbarrier wait. Return (32,) the released clocks of the waiting warp's own lanes."""
        known = self._mbarriers.get(row)
        if known is None:
            return np.zeros(32, np.int64)
        if self.cluster_size > 1:
            self.blocks[block] = np.maximum(self.blocks[block], self._mbarriers_of_clusters[row])
        partial = self._partial.get(row, {})
        before = {other: np.full(32, self.warps[block, warp, other]) for other in partial}
        before |= {other: late.lanes for other, late in self.late.get((block, warp), {}).items() if other in before}
        self.join(block, warp, known)
        for other, passed in partial.items():
            lanes, until = np.maximum(before[other], passed), int(self.warps[block, warp, other])
            if other != warp and lanes.min() < until:
                self.late.setdefault((block, warp), {})[other] = _Late(until, lanes)
        return partial.get(warp, np.full(32, known[0, warp]))

    def is_late(
        self, blocks: Numbers, warp: int, others: Numbers, lanes: Numbers, numbers: Numbers
    ) -> NDArray[np.bool_]:
        """Return which accesses, by lanes of other warps (-1: by none), are late for a warp of some blocks."""
        result = np.zeros(len(numbers), np.bool_)
        for block in np.unique(blocks).tolist():
            for other, late in self.late.get((block, warp), {}).items():
                result |= (blocks == block) & (others == other) & (lanes >= 0) & (late.lanes[lanes] < numbers)
        return result

    # ---- memory -----------------------------------------------------------------------------------------------------

    def fence(self, blocks: list[int], warp: int, scope: int) -> None:
        """Execute a fence for a warp of some blocks."""
        for block in blocks:
            self.fenced_warps[block, warp] = self.snapshot(block, warp)[0]
            for at_least, fenced in self.fenced.items():
                if scope >= at_least:
                    fenced[block] = self.blocks[block]
                    fenced[block, block] = self.now

    def store_release(self, space: str, address: int, block: int, warp: int, scope: int) -> int:
        """Store the clock of a warp at a word. Return the component of the warp itself."""
        location = self._words.setdefault((space, address), _SyncWord())
        location.version += 1
        if (space == "global" or self.cluster_size > 1) and scope >= CLUSTER:
            _join(location.clusters, block // self.cluster_size, self.fenced[CLUSTER][block])
        if space == "global" and scope >= DEVICE:
            location.blocks = np.maximum(location.blocks, self.fenced[DEVICE][block])
        known = self.snapshot(block, warp)
        known[0] = self.fenced_warps[block, warp]
        _join(location.warps, block, known)
        foreign = known[0].copy()
        own, foreign[warp] = int(foreign[warp]), 0
        _join(location.foreign, block, foreign)
        return own

    def store_release_lanes(self, space: str, address: int, block: int, warp: int, known: Numbers) -> None:
        """Store (32,) clock components of the lanes of a warp at a word."""
        _join(self._words[space, address].lanes, (block, warp), known)

    def load_acquire(self, space: str, address: int, block: int, warp: int, scope: int) -> None:
        """Join the clock stored at a word into the reader's."""
        location = self._words.get((space, address))
        if location is None:
            return
        key = (block, warp, space, address)
        if self._seen.get(key) == location.version:
            return
        if scope == DEVICE:
            self._seen[key] = location.version
        mine, cluster = self.blocks[block], block // self.cluster_size
        if scope >= CLUSTER and cluster in location.clusters:
            np.maximum(mine, location.clusters[cluster], out=mine)
        if space == "global" and scope >= DEVICE:
            np.maximum(mine, location.blocks, out=mine)
        if block in location.warps:
            self.join(block, warp, location.warps[block])

    def load_acquire_lanes(self, space: str, address: int, block: int, warp: int) -> Numbers | None:
        """Return (32,) the clock components of the reader's lanes that are stored at a word."""
        location = self._words.get((space, address))
        if location is None or block not in location.foreign:
            return None
        others = location.foreign[block][warp]
        lanes = location.lanes.get((block, warp))
        return np.full(32, others) if lanes is None else np.maximum(lanes, others)

"""What is known to have happened before what, between the warps of a block and between blocks.

Accesses are numbered in the order of their execution. Each warp has a vector clock: up to which number it knows the
accesses of each warp of its block; each block, as a whole, has one for the other blocks. Barriers and mbarriers pass
knowledge on inside a block. Between blocks, and through flags and locks, atomic, volatile and acquire or release
accesses do: a write passes on what its block knew at its last fence (a release: what it knows), a read takes up what
was passed on there. An ordinary write counts as one of these where another thread waits for it in this way.

Next to it each warp has two more, of accesses that a fence of the asynchronous proxy came after too (see proxies.py):
the fence copies the first clock to them, and what passes the one on passes on the others.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.int64]
#: Knows all of it.
EVERYTHING = np.iinfo(np.int64).max


@dataclass
class _Place:
    """A word through which threads synchronize: what was passed on there, to blocks and to warps of each block."""

    version: int = 0
    blocks: Any = 0
    warps: dict[int, Numbers] = field(default_factory=dict)


class Ordering:
    """The knowledge of the warps and blocks that run together. ``through_memory``: whether any is passed on there."""

    def __init__(self, blocks: int, warps: int, through_memory: bool, proxies: bool = False) -> None:
        """``proxies``: whether to keep the clocks of proxy fences."""
        self.through_memory = through_memory
        self._clocks = np.zeros((blocks, warps, 3 if proxies else 1, warps), np.int64)
        #: [block, warp, warp of the block]: which accesses of the latter the former knows to be over.
        self.warps = self._clocks[:, :, 0]
        self.warps[:, range(warps), range(warps)] = EVERYTHING
        #: [block, warp, writes or reads, warp of the block]: which of these writes and reads a proxy fence came after.
        self.proxied = self._clocks[:, :, 1:] if proxies else None
        #: For each warp number, what every block's warp knows at least of all others.
        self.floor = [EVERYTHING if warps == 1 else 0] * warps
        self.now = 0
        count = blocks if through_memory else 0
        #: [block, block], and as it was at each block's last fence.
        self.blocks = np.zeros((count, count), np.int64)
        self.fenced = np.zeros((count, count), np.int64)
        self._places: dict[tuple[str, int], _Place] = {}
        self._seen: dict[tuple[int, int, str, int], int] = {}
        self._barriers: dict[int, Numbers] = {}
        self._mbarriers: dict[int, Numbers] = {}

    def of(self, block: int, warp: int) -> Numbers:
        """(clocks, warps) what a warp passes on to others of its block."""
        known: Numbers = self._clocks[block, warp].copy()
        known[0, warp] = self.now  # in place of everything
        return known

    def learn(self, block: int, warp: int, known: Numbers) -> None:
        """A warp takes up what others of its block knew."""
        mine = self._clocks[block, warp]
        np.maximum(mine, known, out=mine)

    def fence_proxy(self, blocks: Any, warps: Any, until: Any, kinds: slice) -> None:
        """Proxy fences by warps of blocks, for writes or reads that they know, up to the access ``until``."""
        if self.proxied is not None:
            known = np.minimum(self.warps[blocks, warps], np.asarray(until)[..., None])[..., None, :]
            self.proxied[blocks, warps, kinds] = np.maximum(self.proxied[blocks, warps, kinds], known)

    def level(self, warps: NDArray[np.intp]) -> None:
        """Recompute what these warps know at least."""
        count = self.warps.shape[1]
        for warp in warps.tolist():
            self.floor[warp] = int(self.warps[:, warp].min()) if count > 1 else EVERYTHING

    # ---- barriers of a block ----------------------------------------------------------------------------------------

    def arrive(self, keys: list[int], blocks: list[int], warp: int) -> None:
        """A warp of some blocks comes to barriers and does not wait there; ``keys``: one barrier in each block."""
        for key, block in zip(keys, blocks, strict=True):
            known = self.of(block, warp)
            before = self._barriers.get(key)
            self._barriers[key] = known if before is None else np.maximum(before, known)

    def release(self, waiting: dict[int, tuple[int, list[int]]]) -> None:
        """Barriers are complete; ``waiting``: by barrier, the block and the warps that wait there."""
        for key, (block, warps) in waiting.items():
            known = self._barriers.pop(key, np.zeros(1, np.int64))
            for warp in warps:
                known = np.maximum(known, self.of(block, warp))
            for warp in warps:
                self.learn(block, warp, known)
        self.level(np.unique([warp for _, warps in waiting.values() for warp in warps]))

    def level_blocks(self, blocks: NDArray[np.int64]) -> None:
        """All warps of some blocks leave a barrier that all of them came to."""
        own = np.arange(self.warps.shape[1])
        if self.proxied is not None:
            self.proxied[blocks] = self.proxied[blocks].max(axis=1, keepdims=True)
        self.warps[blocks] = self.now
        self.warps[blocks[:, None], own, own] = EVERYTHING
        self.level(own)

    def level_cluster(self, blocks: NDArray[np.int64], until: int) -> None:
        """Warps of a cluster's blocks leave a barrier that all of them came to after the access ``until``."""
        self.warps[blocks] = np.maximum(self.warps[blocks], until)
        self.level(np.arange(self.warps.shape[1]))
        if self.through_memory:
            self.blocks[blocks] = self.blocks[blocks].max(axis=0)
            among = np.ix_(blocks, blocks)
            self.blocks[among] = np.maximum(self.blocks[among], until)

    # ---- mbarriers --------------------------------------------------------------------------------------------------

    def pass_to(self, row: int, block: int, warp: int) -> None:
        """A warp arrives at an mbarrier."""
        known = self.of(block, warp)
        before = self._mbarriers.get(row)
        self._mbarriers[row] = known if before is None else np.maximum(before, known)

    def take_from(self, row: int, block: int, warp: int) -> None:
        """A warp has waited for an mbarrier."""
        known = self._mbarriers.get(row)
        if known is not None:
            self.learn(block, warp, known)

    # ---- memory -----------------------------------------------------------------------------------------------------

    def fence(self, blocks: list[int]) -> None:
        """Blocks execute a fence of the device's or a wider scope."""
        for block in blocks:
            self.fenced[block] = self.blocks[block]
            self.fenced[block, block] = self.now

    def publish(self, space: str, address: int, block: int, warp: int, releases: bool, narrow: bool = False) -> None:
        """A warp writes to a place; releases: with release semantics, which need no fence; narrow: for its block."""
        if releases and not narrow:
            self.fence([block])
        place = self._places.setdefault((space, address), _Place())
        place.version += 1
        if space == "global" and not narrow:
            place.blocks = np.maximum(place.blocks, self.fenced[block])
        before = place.warps.get(block)
        known = self.of(block, warp)
        place.warps[block] = known if before is None else np.maximum(before, known)

    def observe(self, space: str, address: int, block: int, warp: int, narrow: bool = False) -> None:
        """A warp reads a place; narrow: what others of its block wrote there."""
        place = self._places.get((space, address))
        if place is None:
            return
        key = (block, warp, space, address)
        if self._seen.get(key) == place.version:
            return
        if not narrow:
            self._seen[key] = place.version
        if space == "global" and not narrow:
            np.maximum(self.blocks[block], place.blocks, out=self.blocks[block])
        if block in place.warps:
            self.learn(block, warp, place.warps[block])

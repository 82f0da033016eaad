"""Instructions that several threads execute together: of a warp (.sync) and of a warpgroup (wgmma).

A thread at a .sync instruction waits until all threads that its membermask names, and that have not ended, are at one
with the same mask; the mask need not be of a whole warp, and several groups of a warp may be waiting. Threads may
come to bar.warp.sync at different instructions (PTX ISA, "bar.warp.sync"); to the others at one.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from greenfast.emulator.instructions.operands import Reader, reader
from greenfast.emulator.machine.blocks import WARP, ThreadSet, are_whole_warps, lane_count, lane_indices
from greenfast.emulator.machine.state import ResidentBlocks
from greenfast.emulator.ptx.syntax import Immediate, Instruction

_WARPGROUP = 4
_ALL = 0xFFFFFFFF
_BITS = np.uint32(1) << np.arange(WARP, dtype=np.uint32)


class SyncGroup:
    """The warps that an instruction needs together, and the threads of each warp (None: all).

    key: threads at instructions with one key run together; empty: only threads at the same instruction. aligned: all
    threads of a warp execute the instruction together, as for matrices.
    """

    def __init__(self, warps: int, mask: Reader | None, key: str = "", aligned: bool = False) -> None:
        self.warps, self.mask, self.key, self.aligned = warps, mask, key, aligned


def parse_sync_group(i: Instruction) -> SyncGroup | None:
    """Return the threads that an instruction needs together; None if each thread may execute it alone."""
    if i.name == "wgmma":
        return SyncGroup(_WARPGROUP if i.parts[0] == "mma_async" else 1, None, aligned=True)
    if i.name in ("bar", "barrier"):
        return SyncGroup(1, _mask(i, 0), "bar.warp.sync") if "warp" in i.parts else None
    if "sync" not in i.parts or i.name == "setmaxnreg":  # setmaxnreg is the same for each thread alone
        return None
    return SyncGroup(1, None, aligned=True) if "aligned" in i.parts else SyncGroup(1, _mask(i, -1))


def _mask(i: Instruction, operand: int) -> Reader | None:
    """Return the reader of a membermask; None for the literal mask of all threads."""
    mask = i.operands[operand]
    if isinstance(mask, Immediate) and mask.bits & _ALL == _ALL:
        return None
    return reader(mask, "u32", i)


class SyncGroups:
    """The threads that have arrived at collective instructions and wait for other threads."""

    def __init__(self, machine: ResidentBlocks, sync_groups: dict[int, SyncGroup]) -> None:
        self.m, self.sync_groups = machine, sync_groups
        # By key: the threads that have arrived. By thread: its mask and its instruction.
        self.arrived: dict[str | int, NDArray[np.bool_]] = {}
        self.masks = np.zeros(machine.lanes, np.uint32)
        self.pcs = np.zeros(machine.lanes, np.int64)

    def complete(self, pc: int, lanes: ThreadSet) -> bool:
        """Return whether arriving threads are complete by themselves, with each warp as one group."""
        sync_group = self.sync_groups[pc]
        if sync_group.warps != 1 or lane_count(lanes) % WARP or not are_whole_warps(lanes):
            return False
        if sync_group.mask is None:
            return True
        return bool((np.asarray(sync_group.mask(self.m, lanes)) == _ALL).all())

    def arrive(self, pc: int, lanes: ThreadSet) -> list[NDArray[np.intp]]:
        """Arrive at an instruction. Return the threads that can run now, in groups with one mask for each warp."""
        sync_group = self.sync_groups[pc]
        key = sync_group.key or pc
        arrived = self.arrived.get(key)
        if arrived is None:
            arrived = self.arrived[key] = np.zeros(self.m.lanes, np.bool_)
        masks = np.asarray(_ALL, np.uint32) if sync_group.mask is None else np.asarray(sync_group.mask(self.m, lanes))
        indices = lane_indices(lanes)
        absent = np.broadcast_to(masks & _BITS[indices % WARP] == 0, len(indices))
        if absent.any():
            lane = int(indices[absent][0])
            mask = int(np.broadcast_to(masks, len(indices))[absent][0])
            raise self.m.fault(f"a thread that its own membermask {mask:#010x} does not name", lane)
        arrived[lanes] = True
        self.masks[lanes] = masks
        self.pcs[lanes] = pc
        return self._take(key)

    def poll(self) -> list[NDArray[np.intp]]:
        """Check incomplete groups again after threads have ended. Return the groups that can run."""
        return [group for key in list(self.arrived) for group in self._take(key)]

    def _take(self, key: str | int) -> list[NDArray[np.intp]]:
        """Take the complete groups of a place."""
        arrived = self.arrived[key]
        indices = np.flatnonzero(arrived)
        if not len(indices):
            return []
        warps = 1 if isinstance(key, str) else self.sync_groups[key].warps
        if warps > 1:
            go = self._warpgroups(arrived, warps)
            arrived[go] = False
            return [go] if len(go) else []
        masks, warp = self.masks[indices], indices // WARP
        groups, of_group = np.unique(warp << 32 | masks, return_inverse=True)
        present = np.zeros(len(groups), np.uint32)
        np.bitwise_or.at(present, of_group, _BITS[indices % WARP])
        living = ~self.m.ended.reshape(-1, WARP)[groups >> 32]
        needed = (living @ _BITS.astype(np.int64)).astype(np.uint32) & (groups & _ALL).astype(np.uint32)
        complete = (needed & ~present) == 0
        go = complete[of_group]
        arrived[indices[go]] = False
        # A warp's second group is a call by itself: an operation finds one mask in each warp.
        order = np.zeros(len(groups), np.int64)
        chosen = np.flatnonzero(complete)
        _, first = np.unique(groups[chosen] >> 32, return_index=True)
        starts = np.zeros(len(chosen), np.int64)
        starts[first] = first
        order[chosen] = np.arange(len(chosen)) - np.maximum.accumulate(starts)
        rank = order[of_group]
        return [indices[go & (rank == n)] for n in np.unique(rank[go])]

    def _warpgroups(self, arrived: NDArray[np.bool_], warps: int) -> NDArray[np.intp]:
        m = self.m
        groups = m.warps // warps
        if not groups:
            reason = f"an instruction of a warpgroup, {warps * WARP} threads, in a block of {m.geometry.threads}"
            raise m.fault(reason, int(np.flatnonzero(arrived)[0]))
        table = arrived[: groups * warps * m.threads_per_warp_slot].reshape(groups, warps, -1, WARP)
        complete = np.asarray(table.all(axis=(1, 3)))
        chosen = np.zeros(m.lanes, np.bool_)
        chosen[: table.size] = np.broadcast_to(complete[:, None, :, None], table.shape).ravel()
        return np.flatnonzero(arrived & chosen)

    def waits(self, lanes: NDArray[np.intp]) -> dict[int, tuple[int, str]]:
        """Return, by instruction, how many threads wait there and the other threads that they wait for."""
        result: dict[int, tuple[int, str]] = {}
        for arrived in self.arrived.values():
            here = lanes[arrived[lanes]]
            for pc in np.unique(self.pcs[here]):
                mine = here[self.pcs[here] == pc]
                group = "warpgroup" if self.sync_groups[int(pc)].warps > 1 else "warp"
                masks: Any = np.unique(self.masks[mine])
                named = "" if masks.tolist() == [_ALL] else f" in membermask {', '.join(f'{x:#010x}' for x in masks)}"
                result[int(pc)] = (len(mine), f" for the rest of the {group}{named}")
        return result

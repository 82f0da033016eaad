"""Instructions between the threads of a warp: shuffles, votes, matches, reductions, elections.

The participants are the threads that execute the instruction together, as the scheduler decides, and that have the same
member mask. Threads of a warp with the same mask are one group and exchange values. Threads in the mask that have ended
do not take part.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from greenfast.emulator.instructions.access import FUNCTIONS
from greenfast.emulator.instructions.operands import Reader, list_items, parse_dtype, parse_type, reader, writer
from greenfast.emulator.machine.blocks import WARP, ThreadSet, Values, lane_indices
from greenfast.emulator.machine.state import Operation, ResidentBlocks
from greenfast.emulator.ptx.syntax import Instruction

_LANE = np.arange(WARP)
_BIT = np.uint32(1) << _LANE.astype(np.uint32)
_FULL = np.uint32(0xFFFFFFFF)

#: Result of a shuffle from a thread that takes no part, with even and odd seeds. The PTX ISA leaves it open. The first
#: is NaN as a float.
_NOBODY = (np.uint32(0xFFFFFFFF), np.uint32(0))


def whole_warps(m: ResidentBlocks, lanes: ThreadSet, operation: str) -> NDArray[np.intp]:
    """Return (warps, 32) thread indices. Report an incomplete warp."""
    indices = lane_indices(lanes)
    complete = len(indices) % WARP == 0
    if complete:
        table = indices.reshape(-1, WARP)
        complete = bool((table[:, 0] % WARP == 0).all() and (table == table[:, :1] + _LANE).all())
    if not complete:
        warps, counts = np.unique(indices // WARP, return_counts=True)
        short = warps[counts < WARP][0]
        lane = int(indices[indices // WARP == short][0])
        raise m.fault(f"{operation} by only some threads of a warp", lane)
    return table


@dataclass(frozen=True)
class _Members:
    """The threads of some warps that execute an instruction together, and which of them form groups.

    rows, columns: the warp (counted among these) and lane of each thread, None where all warps are whole.
    present: (warps, 32) which lanes execute. masks: (warps, 32) member masks, 0 for the others; None where every
    thread is in one group with the whole warp.
    """

    warps: int
    rows: NDArray[np.intp] | None
    columns: NDArray[np.intp] | None
    masks: NDArray[np.uint32] | None

    def table(self, values: Values, fill: Any = 0) -> Values:
        """Return (warps, 32) values of the threads, ``fill`` for lanes that do not execute."""
        values = np.asarray(values)
        if self.rows is None:
            return np.broadcast_to(values, self.warps * WARP).reshape(-1, WARP)
        result = np.full((self.warps, WARP), fill, values.dtype)
        result[self.rows, self.columns] = values
        return result

    def flat(self, table: Values) -> Values:
        """Return the threads' values from (warps, 32), or of (warps,) from their warp's."""
        if table.ndim == 1:
            return np.repeat(table, WARP) if self.rows is None else table[self.rows]
        return table.reshape(-1) if self.rows is None else table[self.rows, self.columns]

    def peers(self) -> NDArray[np.bool_]:
        """Return (warps, 32, 32): whether two lanes execute with the same mask and are both in it."""
        if self.masks is None:
            return np.ones((self.warps, WARP, WARP), np.bool_)
        masks = self.masks
        result: NDArray[np.bool_] = (masks[:, :, None] == masks[:, None, :]) & (masks[:, :, None] & _BIT != 0)
        return result


def _members(m: ResidentBlocks, lanes: ThreadSet, mask: Reader) -> _Members:
    """Return the executing threads and their masks. Report a thread that is not in its own mask."""
    supplied = np.asarray(mask(m, lanes))
    every = bool((supplied == _FULL).all())
    if isinstance(lanes, slice) and every:
        return _Members((lanes.stop - lanes.start) // WARP, None, None, None)
    indices = lane_indices(lanes)
    own = np.broadcast_to(supplied, len(indices))
    lost = np.flatnonzero(own >> (indices % WARP).astype(np.uint32) & np.uint32(1) == 0)
    if len(lost):
        index = lost[0]
        reason = f"a thread that its own membermask {int(own[index]):#010x} does not name"
        raise m.fault(reason, int(indices[index]))
    warps, rows = np.unique(indices // WARP, return_inverse=True)
    columns = indices % WARP
    masks = np.zeros((len(warps), WARP), np.uint32)
    masks[rows, columns] = own
    if every and masks.all():
        return _Members(len(warps), None, None, None)
    return _Members(len(warps), rows, columns, masks)


def _bits(flags: NDArray[np.bool_]) -> NDArray[np.uint32]:
    """Masks from (..., 32) flags."""
    result: NDArray[np.uint32] = np.where(flags, _BIT, np.uint32(0)).sum(axis=-1, dtype=np.uint32)
    return result


def shuffle(i: Instruction) -> Operation:
    """Build shfl.sync: bfly, up, down and idx within segments."""
    mode = next(p for p in i.parts if p in ("bfly", "up", "down", "idx"))
    first, *remainder = list_items(i.operands[0])
    write, write_inside = writer(first, "b32", i), [writer(p, "pred", i) for p in remainder]
    read, by, clamp, mask = (reader(o, "u32", i) for o in i.operands[1:5])

    def run(m: ResidentBlocks, lanes: ThreadSet) -> None:
        members = _members(m, lanes, mask)
        values = members.table(read(m, lanes))
        step = members.table(by(m, lanes)).astype(np.int64) & 31
        control = members.table(clamp(m, lanes)).astype(np.int64)
        segment, limit = control >> 8 & 31, control & 31
        top = (_LANE & segment) | (limit & ~segment)
        if mode == "bfly":
            source, inside = _LANE ^ step, (_LANE ^ step) <= top
        elif mode == "idx":
            source = (_LANE & segment) | (step & ~segment)
            inside = source <= top
        elif mode == "up":
            source, inside = _LANE - step, _LANE - step >= top
        else:
            source, inside = _LANE + step, _LANE + step <= top
        source = np.where(inside, source, _LANE)
        result = np.take_along_axis(values, source, axis=1)
        if members.masks is not None:
            theirs = np.take_along_axis(members.masks, source, axis=1)
            result = np.where(theirs == members.masks, result, _NOBODY[m.seed % 2])
        write(m, lanes, members.flat(result))
        for w in write_inside:
            w(m, lanes, members.flat(inside))

    return run


def vote(i: Instruction) -> Operation:
    """Build vote.sync: all, any, uni, ballot."""
    mode = next(p for p in i.parts if p in ("all", "any", "uni", "ballot"))
    read, mask = reader(i.operands[1], "pred", i), reader(i.operands[2], "u32", i)
    write = writer(i.operands[0], "b32" if mode == "ballot" else "pred", i)

    def run(m: ResidentBlocks, lanes: ThreadSet) -> None:
        members = _members(m, lanes, mask)
        yes = members.table(read(m, lanes))
        peers: Any = np.True_ if members.masks is None else members.peers()
        # (warps, 32, 32), or of whole warps (warps, 32), as all of its threads see the same.
        votes = yes if members.masks is None else yes[:, None, :]
        if mode == "ballot":
            result: Any = _bits(votes & peers)
        else:
            some, none = (votes & peers).any(axis=-1), (~votes & peers).any(axis=-1)
            result = {"all": ~none, "any": some, "uni": ~(some & none)}[mode]
        write(m, lanes, members.flat(result))

    return run


def elect(i: Instruction) -> Operation:
    """Build elect.sync: the lowest thread of a group leads."""
    first, *remainder = list_items(i.operands[0])
    write_lane, write_flag = writer(first, "b32", i), [writer(p, "pred", i) for p in remainder]
    mask = reader(i.operands[1], "u32", i)

    def run(m: ResidentBlocks, lanes: ThreadSet) -> None:
        members = _members(m, lanes, mask)
        leader = members.peers().argmax(axis=2)
        write_lane(m, lanes, members.flat(leader.astype(np.uint32)))
        for w in write_flag:
            w(m, lanes, members.flat(leader == _LANE))

    return run


def reduce(i: Instruction) -> Operation:
    """Build redux.sync over the threads of a group."""
    kind = parse_type(i)
    name = next(p for p in i.parts if p in FUNCTIONS)
    function = FUNCTIONS[name]
    limits = np.iinfo(parse_dtype(kind))
    neutral = {"min": limits.max, "max": limits.min, "and": limits.max}.get(name, 0)
    read, write, mask = reader(i.operands[1], kind, i), writer(i.operands[0], kind, i), reader(i.operands[2], "u32", i)

    def run(m: ResidentBlocks, lanes: ThreadSet) -> None:
        members = _members(m, lanes, mask)
        values = members.table(read(m, lanes))
        if members.masks is None:
            result = function.reduce(values, axis=1)
        else:
            result = function.reduce(np.where(members.peers(), values[:, None, :], values.dtype.type(neutral)), axis=2)
        write(m, lanes, members.flat(result.astype(values.dtype)))

    return run


def match(i: Instruction) -> Operation:
    """Build match.sync: which threads of a group hold the same value (any), or all of them if all do (all)."""
    kind = parse_type(i)
    first, *remainder = list_items(i.operands[0])
    write, write_flag = writer(first, "b32", i), [writer(t, "pred", i) for t in remainder]
    read, mask, every = reader(i.operands[1], kind, i), reader(i.operands[2], "u32", i), "all" in i.parts

    def run(m: ResidentBlocks, lanes: ThreadSet) -> None:
        members = _members(m, lanes, mask)
        values = members.table(read(m, lanes))
        peers = members.peers()
        same = peers & (values[:, :, None] == values[:, None, :])
        if every:
            same = peers & (same == peers).all(axis=2, keepdims=True)
        result = _bits(same)
        write(m, lanes, members.flat(result))
        for w in write_flag:
            w(m, lanes, members.flat(result != 0))

    return run


def active_mask(i: Instruction) -> Operation:
    """Build activemask: the threads of the warp that run this together."""
    write = writer(i.operands[0], "b32", i)

    def run(m: ResidentBlocks, lanes: ThreadSet) -> None:
        indices = lane_indices(lanes)
        masks = np.zeros(m.lanes // WARP, np.uint32)
        np.bitwise_or.at(masks, indices // WARP, np.uint32(1) << (indices % WARP).astype(np.uint32))
        write(m, lanes, masks[indices // WARP])

    return run


BUILDERS: dict[str, Callable[[Instruction], Operation]] = {
    "shfl": shuffle,
    "vote": vote,
    "elect": elect,
    "redux": reduce,
    "match": match,
    "activemask": active_mask,
}

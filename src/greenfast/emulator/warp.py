"""Instructions in which the threads of a warp work together: shuffles, votes, matrix fragments.

The layout of WMMA fragments is unspecified in the PTX ISA; here it is the one of mma.m16n8k16 (fragments.py), with the
second half of A and B fragments unused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from greenfast.emulator.access import addresses, count_access, locate, space_of
from greenfast.emulator.machine import WARP, Lanes, Machine, Operation, Values, lane_indices
from greenfast.emulator.operands import only, reader, type_of, unsupported, writer
from greenfast.emulator.ptx import Instruction, Vector

_LANE = np.arange(WARP)

#: The row and the column of what each lane holds in each register.
Table: TypeAlias = tuple[NDArray[np.intp], NDArray[np.intp]]


def whole_warps(m: Machine, lanes: Lanes, what: str) -> NDArray[np.intp]:
    """(warps, 32) thread indices; a fault where a warp is not complete."""
    indices = lane_indices(lanes)
    complete = len(indices) % WARP == 0
    if complete:
        table = indices.reshape(-1, WARP)
        complete = bool((table[:, 0] % WARP == 0).all() and (table == table[:, :1] + _LANE).all())
    if not complete:
        warps, counts = np.unique(indices // WARP, return_counts=True)
        short = warps[counts < WARP][0]
        lane = int(indices[indices // WARP == short][0])
        raise m.fault(f"{what} by only some threads of a warp", lane)
    return table


def _by_warp(values: Values, table: NDArray[np.intp]) -> Values:
    """(warps, 32) values of the threads of ``table``; a constant is everybody's."""
    return np.broadcast_to(np.asarray(values), table.size).reshape(-1, WARP)


def shuffle(i: Instruction) -> Operation:
    """shfl.sync: bfly, up, down and idx within segments."""
    mode = next(p for p in i.parts if p in ("bfly", "up", "down", "idx"))
    destination = i.operands[0].items if isinstance(i.operands[0], Vector) else (i.operands[0],)
    write = [writer(destination[0], "b32", i), *(writer(p, "pred", i) for p in destination[1:])]
    read, by, clamp = (reader(o, "u32", i) for o in i.operands[1:4])

    def run(m: Machine, lanes: Lanes) -> None:
        table = whole_warps(m, lanes, "a shuffle of all threads")
        values = _by_warp(read(m, lanes), table)
        step = _by_warp(by(m, lanes), table).astype(np.int64) & 31
        control = _by_warp(clamp(m, lanes), table).astype(np.int64)
        mask, limit = control >> 8 & 31, control & 31
        top = (_LANE & mask) | (limit & ~mask)
        if mode == "bfly":
            source, inside = _LANE ^ step, (_LANE ^ step) <= top
        elif mode == "idx":
            source = (_LANE & mask) | (step & ~mask)
            inside = source <= top
        elif mode == "up":
            source, inside = _LANE - step, _LANE - step >= top
        else:
            source, inside = _LANE + step, _LANE + step <= top
        source = np.where(inside, source, _LANE)
        write[0](m, lanes, np.take_along_axis(values, source, axis=1).ravel())
        for w in write[1:]:
            w(m, lanes, inside.ravel())

    return run


def vote(i: Instruction) -> Operation:
    """vote.sync: all, any, uni, ballot."""
    mode = next(p for p in i.parts if p in ("all", "any", "uni", "ballot"))
    read = reader(i.operands[1], "pred", i)
    write = writer(i.operands[0], "b32" if mode == "ballot" else "pred", i)

    def run(m: Machine, lanes: Lanes) -> None:
        table = whole_warps(m, lanes, "a vote of all threads")
        values = _by_warp(read(m, lanes), table)
        if mode == "ballot":
            result = (values.astype(np.uint64) << np.arange(WARP, dtype=np.uint64)).sum(axis=1).astype(np.uint32)
        elif mode == "uni":
            result = values.all(axis=1) | ~values.any(axis=1)
        else:
            result = values.all(axis=1) if mode == "all" else values.any(axis=1)
        write(m, lanes, np.repeat(result, WARP))

    return run


def elect(i: Instruction) -> Operation:
    """elect.sync: the lowest thread of a warp leads."""
    first, *rest = i.operands[0].items if isinstance(i.operands[0], Vector) else (i.operands[0],)
    write_lane, write_flag = writer(first, "b32", i), [writer(p, "pred", i) for p in rest]

    def run(m: Machine, lanes: Lanes) -> None:
        table = whole_warps(m, lanes, "an election of all threads")
        write_lane(m, lanes, np.zeros(table.size, np.uint32))
        for w in write_flag:
            w(m, lanes, table.ravel() % WARP == 0)

    return run


def reduce(i: Instruction) -> Operation:
    """redux.sync over all threads of a warp."""
    kind = type_of(i)
    table_of: dict[str, Any] = {"add": np.add, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and}
    table_of |= {"or": np.bitwise_or, "xor": np.bitwise_xor}
    only(i, "sync", *table_of)
    function = table_of[next(p for p in i.parts if p in table_of)]
    read, write = reader(i.operands[1], kind, i), writer(i.operands[0], kind, i)

    def run(m: Machine, lanes: Lanes) -> None:
        table = whole_warps(m, lanes, "a reduction of all threads")
        values = _by_warp(read(m, lanes), table)
        write(m, lanes, np.repeat(function.reduce(values, axis=1), WARP))

    return run


def match(i: Instruction) -> Operation:
    """match.sync: which threads hold the same value (any), or all of them if all do (all)."""
    kind = type_of(i)
    targets = i.operands[0].items if isinstance(i.operands[0], Vector) else (i.operands[0],)
    write = [writer(targets[0], "b32", i), *(writer(t, "pred", i) for t in targets[1:])]
    read, every = reader(i.operands[1], kind, i), "all" in i.parts

    def run(m: Machine, lanes: Lanes) -> None:
        values = _by_warp(read(m, lanes), whole_warps(m, lanes, "a match of all threads"))
        same = values[:, :, None] == values[:, None, :]
        if every:
            same &= same.all(axis=(1, 2), keepdims=True)
        mask = (same.astype(np.uint64) << np.arange(WARP, dtype=np.uint64)).sum(axis=2).astype(np.uint32)
        write[0](m, lanes, mask.ravel())
        for w in write[1:]:
            w(m, lanes, mask.ravel() != 0)

    return run


def active_mask(i: Instruction) -> Operation:
    """activemask: the threads of the warp that run this together."""
    write = writer(i.operands[0], "b32", i)

    def run(m: Machine, lanes: Lanes) -> None:
        indices = lane_indices(lanes)
        masks = np.zeros(m.lanes // WARP, np.uint32)
        np.bitwise_or.at(masks, indices // WARP, np.uint32(1) << (indices % WARP).astype(np.uint32))
        write(m, lanes, masks[indices // WARP])

    return run


# ---- fragments: tables of the (row, column) that each lane holds in each register half ------------------------------


def _a_table() -> Table:
    """A of m16n8k16: (lane, register, half) -> row, column."""
    lane, register, half = np.meshgrid(_LANE, np.arange(4), np.arange(2), indexing="ij")
    return lane // 4 + register % 2 * 8, lane % 4 * 2 + half + register // 2 * 8


def _b_table() -> Table:
    """B of m16n8k16: (lane, register, half) -> k, column."""
    lane, register, half = np.meshgrid(_LANE, np.arange(2), np.arange(2), indexing="ij")
    return lane % 4 * 2 + half + register * 8, lane // 4


def _c_table() -> Table:
    """C of m16n8k16: (lane, register) -> row, column."""
    lane, register = np.meshgrid(_LANE, np.arange(4), indexing="ij")
    return lane // 4 + register // 2 * 8, lane % 4 * 2 + register % 2


_A, _B, _C = _a_table(), _b_table(), _c_table()
# A WMMA 16x16 operand B and accumulator are two of mma's side by side.
_B16 = (np.concatenate([_B[0], _B[0]], axis=1), np.concatenate([_B[1], _B[1] + 8], axis=1))
_C16 = (np.concatenate([_C[0], _C[0]], axis=1), np.concatenate([_C[1], _C[1] + 8], axis=1))


def _halves(m: Machine, registers: list[Any], lanes: Lanes) -> Values:
    """(warps, 32, registers, 2) halves as float32."""
    columns = [np.ascontiguousarray(np.asarray(r(m, lanes))).view(np.float16).reshape(-1, WARP, 2) for r in registers]
    return np.stack(columns, axis=2).astype(np.float32)


def _matrix(values: Values, table: Table, rows: int, columns: int) -> Values:
    """(warps, rows, columns) from what the lanes hold."""
    matrix = np.zeros((values.shape[0], rows, columns), values.dtype)
    matrix[:, table[0], table[1]] = values
    return matrix


def _floats(m: Machine, registers: list[Any], lanes: Lanes) -> Values:
    """(warps, 32, registers) float32."""
    return np.stack(
        [np.broadcast_to(np.asarray(r(m, lanes)), (len(lane_indices(lanes)),)) for r in registers], axis=1
    ).reshape(-1, WARP, len(registers))


def _product(i: Instruction, columns: int, b_table: Table, c_table: Table) -> Operation:
    """d = a * b + c of 16 x 16 times 16 x ``columns``; b and c lie in the lanes as their tables say."""
    d, a, b, c = (o.items for o in i.operands if isinstance(o, Vector))
    # Of a WMMA fragment's eight registers the first four hold the operand.
    read_a, read_b = ([reader(r, "b32", i) for r in items[:4]] for items in (a, b))
    read_c, write = [reader(r, "f32", i) for r in c], [writer(r, "f32", i) for r in d]

    def run(m: Machine, lanes: Lanes) -> None:
        whole_warps(m, lanes, "a matrix instruction")
        left = _matrix(_halves(m, read_a, lanes), _A, 16, 16)
        right = _matrix(_halves(m, read_b, lanes), b_table, 16, columns)
        total = _matrix(_floats(m, read_c, lanes), c_table, 16, columns) + left @ right
        m.counts.matrix(len(left), 2 * 16 * columns * 16)
        for n, w in enumerate(write):
            w(m, lanes, total[:, c_table[0][:, n], c_table[1][:, n]].ravel())

    return run


def wmma(i: Instruction) -> Operation:
    """wmma.load, wmma.mma and wmma.store of m16n16k16, half operands, float32 accumulators."""
    if "m16n16k16" not in i.parts:
        raise unsupported(i)
    action = i.parts[0]
    if action == "mma":
        if list(i.parts[-2:]) != ["f32", "f32"]:
            raise unsupported(i)
        return _product(i, 16, _B16, _C16)
    return _wmma_load(i) if action == "load" else _wmma_store(i)


def _element_offsets(
    i: Instruction, address: Any, stride: Any, size: int
) -> Callable[[Machine, Lanes], tuple[Any, NDArray[np.int64], NDArray[np.intp], str]]:
    """A function that gives the arena and the (warps, 16, 16) offsets of a tile's elements [row][column]."""
    space = space_of(i)
    where = addresses(address, i)
    pitch = reader(stride, "s32", i)
    column_major = "col" in i.parts

    def run(m: Machine, lanes: Lanes) -> tuple[Any, NDArray[np.int64], NDArray[np.intp], str]:
        table = whole_warps(m, lanes, "a WMMA access")
        first = where(m, lanes).reshape(-1, WARP)
        uniform = (first == first[:, :1]).all(axis=1)
        if not uniform.all():
            raise m.fault("the address of a WMMA tile differs within a warp", int(table[~uniform][0, 0]))
        step = int(np.asarray(pitch(m, lanes)).ravel()[0])
        row, column = np.meshgrid(np.arange(16), np.arange(16), indexing="ij")
        element = (column * step + row if column_major else row * step + column) * size
        lead = table[:, 0]
        arena, start, actual = locate(m, space, first[:, 0], lead)
        return arena, start[:, None, None] + element, lead, actual

    return run


def _count_tile(
    m: Machine, i: Instruction, space: str, store: bool, offsets: NDArray[np.int64], lead: NDArray[np.intp]
) -> None:
    """Count the access of a tile, by (warps, 16, 16) offsets of its elements, as the hardware's threads make it.

    PTX leaves open which thread touches which element. What ptxas makes of it for sm_80 and up: halves are read by one
    ldmatrix of four matrices (LDSM.16.M88.4, .MT88.4 where the tile is stored the other way), a thread per 16 bytes;
    an accumulator has the layout of mma's, and goes in four accesses of 64 bits (two neighbours of a row) where the
    tile is stored by rows, in eight of 32 bits where it is stored by columns. Tests hold this against the machine code.
    """
    threads = (lead[:, None] + _LANE).ravel()
    by_rows = "row" in i.parts
    if i.parts[1] in "ab":
        lines = offsets if by_rows else offsets.swapaxes(1, 2)
        accesses, size = [lines[:, :, ::8].swapaxes(1, 2)], 16
    else:
        held = offsets[:, _C16[0], _C16[1]]
        step, size = (2, 8) if by_rows else (1, 4)
        accesses = [held[:, :, n] for n in range(0, 8, step)]
    for found in accesses:
        count_access(m, space, store, np.ascontiguousarray(found).ravel(), threads, size)


def _wmma_load(i: Instruction) -> Operation:
    which = i.parts[1]
    half = which in "ab"
    table = {"a": _A, "b": _B16, "c": _C16}[which]
    destination = i.operands[0]
    assert isinstance(destination, Vector)
    write = [writer(r, "b32" if half else "f32", i) for r in destination.items]
    tile = _element_offsets(i, i.operands[1], i.operands[2], 2 if half else 4)
    size = 2 if half else 4

    def run(m: Machine, lanes: Lanes) -> None:
        arena, offsets, lead, space = tile(m, lanes)
        flat = offsets.reshape(-1)
        with m.accessing(np.repeat(lead, 256), space):
            data = arena.read(flat, size, "WMMA tile read")
        _count_tile(m, i, space, False, offsets, lead)
        values = data.view(np.uint16 if half else np.float32).reshape(-1, 16, 16)
        held = values[:, table[0], table[1]]
        for n, w in enumerate(write):
            if half:
                # The hardware holds A and B twice; here the second half of the fragment repeats the first.
                pairs = np.ascontiguousarray(held[:, :, n % held.shape[2]])
                w(m, lanes, pairs.view(np.uint32).ravel())
            else:
                w(m, lanes, held[:, :, n].ravel())

    return run


def _wmma_store(i: Instruction) -> Operation:
    source = i.operands[1]
    assert isinstance(source, Vector)
    read = [reader(r, "f32", i) for r in source.items]
    tile = _element_offsets(i, i.operands[0], i.operands[2], 4)
    if type_of(i) != "f32":
        raise unsupported(i)

    def run(m: Machine, lanes: Lanes) -> None:
        arena, offsets, lead, space = tile(m, lanes)
        matrix = _matrix(_floats(m, read, lanes), _C16, 16, 16)
        flat = offsets.reshape(-1)
        with m.accessing(np.repeat(lead, 256), space):
            arena.write(flat, np.ascontiguousarray(matrix.reshape(-1, 1)).view(np.uint8), "WMMA tile write")
        _count_tile(m, i, space, True, offsets, lead)

    return run


BUILDERS = {
    "shfl": shuffle,
    "vote": vote,
    "elect": elect,
    "redux": reduce,
    "match": match,
    "activemask": active_mask,
    "wmma": wmma,
}

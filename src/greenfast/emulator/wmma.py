"""WMMA: tiles of a matrix in memory, and products of them, by whole warps (PTX ISA, "wmma").

The layout of fragments is unspecified in the PTX ISA; here it is the one of mma.m16n8k16 (fragments.py), with the
second half of A and B fragments unused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from greenfast.emulator.access import addresses, count_access, locate, space_of
from greenfast.emulator.machine import WARP, Lanes, Machine, Operation, Values, lane_count, lane_indices
from greenfast.emulator.operands import reader, type_of, unsupported, writer
from greenfast.emulator.ptx import Instruction, Vector
from greenfast.emulator.warp import whole_warps

_LANE = np.arange(WARP)

#: The row and the column of what each lane holds in each register.
Table: TypeAlias = tuple[NDArray[np.intp], NDArray[np.intp]]


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
        steps = np.broadcast_to(np.asarray(pitch(m, lanes)), lane_count(lanes)).reshape(-1, WARP)
        uniform = (steps == steps[:, :1]).all(axis=1)
        if not uniform.all():
            raise m.fault("the stride of a WMMA tile differs within a warp", int(table[~uniform][0, 0]))
        step = steps[:, :1, None].astype(np.int64)
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


BUILDERS = {"wmma": wmma}

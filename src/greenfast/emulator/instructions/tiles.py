"""Tiles of 8x8 16-bit elements that a warp holds in registers: ldmatrix, stmatrix and movmatrix.

Lane l holds the elements 2 * (l % 4) and the next of row l // 4, of each tile in a separate register (PTX ISA).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from greenfast.emulator.instructions.access import Offsets, addresses, count_access, locate, parse_space
from greenfast.emulator.instructions.operands import list_items, reader, writer
from greenfast.emulator.instructions.warp import whole_warps
from greenfast.emulator.machine.blocks import WARP, ThreadSet, Values, lane_count
from greenfast.emulator.machine.memory import Arena
from greenfast.emulator.machine.state import Operation, ResidentBlocks
from greenfast.emulator.ptx.syntax import Instruction, Operand

_ROW_BYTES = 16


def _count(i: Instruction) -> int:
    """Return how many tiles a load or store moves."""
    return int(next(p[1:] for p in i.parts if p in ("x1", "x2", "x4")))


def _read_rows(
    i: Instruction, operand: Operand, count: int
) -> Callable[[ResidentBlocks, ThreadSet], tuple[NDArray[np.intp], Arena, Offsets, str]]:
    """Build a function that returns the lanes and addresses of rows (8n to 8n + 7 for tile n)."""
    where, space = addresses(operand, i), parse_space(i)

    def run(m: ResidentBlocks, lanes: ThreadSet) -> tuple[NDArray[np.intp], Arena, Offsets, str]:
        rows = whole_warps(m, lanes, i.name)[:, : 8 * count].ravel()
        result = where(m, lanes).reshape(-1, WARP)[:, : 8 * count].ravel()
        arena, offsets, actual = locate(m, space, result, rows)
        if actual != "shared":
            raise m.fault(f"{i.name} of a matrix in {actual} memory, not in shared memory", int(rows[0]))
        return rows, arena, offsets, actual

    return run


def ldmatrix(i: Instruction) -> Operation:
    """Build ldmatrix: 1, 2 or 4 tiles, transposed or not."""
    count, transposed = _count(i), "trans" in i.parts
    write = [writer(r, "b32", i) for r in list_items(i.operands[0])]
    where = _read_rows(i, i.operands[1], count)

    def run(m: ResidentBlocks, lanes: ThreadSet) -> None:
        rows, arena, offsets, space = where(m, lanes)
        with m.accessing(rows, space):
            data = arena.read(offsets, _ROW_BYTES, "16-byte matrix row read")
        count_access(m, "shared", False, offsets, rows, _ROW_BYTES)
        tiles = data.view(np.uint16).reshape(-1, count, 8, 8)
        if transposed:
            tiles = tiles.swapaxes(2, 3)
        for n, w in enumerate(write):
            w(m, lanes, _words(tiles[:, n]))

    return run


def stmatrix(i: Instruction) -> Operation:
    """Build stmatrix: 1, 2 or 4 tiles, transposed or not."""
    count, transposed = _count(i), "trans" in i.parts
    read = [reader(r, "b32", i) for r in list_items(i.operands[1])]
    where = _read_rows(i, i.operands[0], count)

    def run(m: ResidentBlocks, lanes: ThreadSet) -> None:
        rows, arena, offsets, space = where(m, lanes)
        tiles = np.stack([_tile(np.broadcast_to(r(m, lanes), lane_count(lanes))) for r in read], axis=1)
        if transposed:
            tiles = tiles.swapaxes(2, 3)
        with m.accessing(rows, space):
            data = np.ascontiguousarray(tiles).reshape(-1, 8).view(np.uint8)
            arena.write(offsets, data, "16-byte matrix row write")
        count_access(m, "shared", True, offsets, rows, _ROW_BYTES)

    return run


def movmatrix(i: Instruction) -> Operation:
    """Build movmatrix.trans: transpose one tile between the registers of a warp."""
    read, write = reader(i.operands[1], "b32", i), writer(i.operands[0], "b32", i)

    def run(m: ResidentBlocks, lanes: ThreadSet) -> None:
        table = whole_warps(m, lanes, "movmatrix")
        write(m, lanes, _words(_tile(np.broadcast_to(read(m, lanes), table.size)).swapaxes(1, 2)))

    return run


def _tile(words: Values) -> NDArray[np.uint16]:
    """Return (warps, 8, 8) elements from the lanes' words."""
    return np.ascontiguousarray(words).view(np.uint16).reshape(-1, 8, 8)


def _words(tiles: NDArray[np.uint16]) -> Values:
    """Return the inverse of _tile."""
    return np.ascontiguousarray(tiles).reshape(-1, 2).view(np.uint32).ravel()


BUILDERS = {"ldmatrix": ldmatrix, "stmatrix": stmatrix, "movmatrix": movmatrix}

"""WMMA: tiles of a matrix in memory, and products of them, by whole warps (PTX ISA, "wmma").

The layout of fragments is unspecified in the PTX ISA; here it is the one of mma.sync (fragments.py), with the second
half of A and B fragments of halves a repetition of the first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from greenfast.emulator.instructions.access import addresses, count_access, locate, parse_space
from greenfast.emulator.instructions.formats import BITS
from greenfast.emulator.instructions.fragments import (
    Registers,
    left_words,
    parse_shape,
    product,
    read_sums,
    register_type,
    registers,
    right_words,
    sums_held,
    write_sums,
)
from greenfast.emulator.instructions.operands import parse_dtype, reader
from greenfast.emulator.instructions.warp import whole_warps
from greenfast.emulator.machine.blocks import WARP, ThreadSet, lane_count
from greenfast.emulator.machine.memory import Arena
from greenfast.emulator.machine.state import Operation, ResidentBlocks
from greenfast.emulator.ptx.syntax import Immediate, Instruction, Operand

_LANE = np.arange(WARP)
_Places = NDArray[np.int64]


def wmma(i: Instruction) -> Operation:
    """Build wmma.load, wmma.mma and wmma.store."""
    action = i.parts[0]
    if action == "load":
        return _load(i)
    if action == "store":
        return _store(i)
    kinds = [p for p in i.parts if p in BITS or p in ("f32", "s32")]
    d, a, b, c = i.operands
    return product(i, d, a, b, c, (kinds[0], "f16", "f16", kinds[1]) if len(kinds) == 2 else kinds)


class _Tile:
    """The elements of a tile in memory.

    A row is one of the (rows, K) of A, of the (columns, K) of B, or of the (rows, columns) of C and D.
    """

    def __init__(self, i: Instruction, address: Operand, stride: Operand | None) -> None:
        self.i = i
        self.which = i.parts[1]
        self.kind = next(p for p in reversed(i.parts) if p in BITS or p in ("f32", "s32"))
        m, n, k = parse_shape(i)
        self.rows, self.length = {"a": (m, k), "b": (n, k)}.get(self.which, (m, n))
        self.size = BITS.get(self.kind, 32) // 8
        # The memory's rows are the fragment's, or its columns.
        self.across = (i.parts[4] == "row") == (self.which == "b")
        shortest = self.rows if self.across else self.length
        self.pitch = reader(Immediate(shortest) if stride is None else stride, "s32", i)
        self.space, self.where = parse_space(i), addresses(address, i)

    def places(self, m: ResidentBlocks, lanes: ThreadSet) -> tuple[Arena, _Places, NDArray[np.intp], str]:
        """Return the arena, (warps, rows, elements) offsets into it, each warp's first thread, and the state space."""
        table = whole_warps(m, lanes, "a WMMA access")
        first = self.where(m, lanes).reshape(-1, WARP)
        steps = np.broadcast_to(np.asarray(self.pitch(m, lanes)), lane_count(lanes)).reshape(-1, WARP)
        for name, values in (("address", first), ("stride", steps)):
            uniform = (values == values[:, :1]).all(axis=1)
            if not uniform.all():
                raise m.fault(f"the {name} of a WMMA tile differs within a warp", int(table[~uniform][0, 0]))
        step = steps[:, :1, None].astype(np.int64)
        row, column = np.arange(self.rows)[:, None], np.arange(self.length)
        element = column * step + row if self.across else row * step + column
        lead = table[:, 0]
        arena, start, actual = locate(m, self.space, first[:, 0], lead)
        return arena, start[:, None, None] + element * self.size, lead, actual

    def threads(self, lead: NDArray[np.intp]) -> NDArray[np.intp]:
        """Return the thread of each element of a tile; PTX leaves open which one it is."""
        row, column = np.arange(self.rows)[:, None], np.arange(self.length)
        across, along = (column, row) if self.across else (row, column)
        lanes = across % 8 * 4 + along * self.size // 4 % 4
        return (lead[:, None, None] + lanes).ravel()

    def count(self, m: ResidentBlocks, space: str, store: bool, offsets: _Places, lead: NDArray[np.intp]) -> None:
        """Count the access of a tile as the hardware's threads make it.

        PTX leaves the assignment of elements to threads open. ptxas for sm_80 and newer reads halves with one ldmatrix
        of four matrices (LDSM.16.M88.4; .MT88.4 for the transposed storage order), one thread per 16 bytes. An
        accumulator has mma's layout: accesses of two neighbours of a row if it is stored by rows, of one element if it
        is stored by columns. Tests compare this with the machine code. Other operands are counted per register if its
        elements are neighbours, else per element.
        """
        threads = (lead[:, None] + _LANE).ravel()
        if self.which in "ab" and self.size == 2:
            lines = offsets.swapaxes(1, 2) if self.across else offsets
            accesses, size = [lines[:, :, ::8].swapaxes(1, 2).reshape(len(lead), -1)], 16
            accesses = [a[:, n : n + WARP] for a in accesses for n in range(0, a.shape[1], WARP)]
        elif self.which in "ab":
            per = max(1, 4 // self.size)
            lines = np.ascontiguousarray(offsets).reshape(len(lead), -1, per)
            apart = [lines[:, :, 0]] if not self.across else [lines[:, :, n] for n in range(per)]
            size = self.size if self.across else max(4, self.size)
            accesses = [part[:, n : n + WARP] for part in apart for n in range(0, part.shape[1], WARP)]
        else:
            held = sums_held(offsets)
            step = 1 if self.across else 2
            size = self.size * step
            accesses = [held[:, :, n] for n in range(0, held.shape[2], step)]
        for result in accesses:
            taking = threads if result.shape[1] == WARP else (lead[:, None] + _LANE[: result.shape[1]]).ravel()
            count_access(m, space, store, np.ascontiguousarray(result).ravel(), taking, size)


def _load(i: Instruction) -> Operation:
    stride = i.operands[2] if len(i.operands) > 2 else None
    tile = _Tile(i, i.operands[1], stride)
    size = tile.size
    if tile.which in "ab":
        to_words: Callable[..., Any] = left_words if tile.which == "a" else right_words
        fragment = Registers(i.operands[0], register_type(tile.kind), i)
        fragment.reading(registers(tile.rows, tile.length, tile.kind))  # it has as many registers at least
        write = fragment.writing()
    else:
        write_matrix = write_sums(i.operands[0], tile.kind, tile.rows, tile.length, i)

    def run(m: ResidentBlocks, lanes: ThreadSet) -> None:
        arena, offsets, lead, space = tile.places(m, lanes)
        flat = offsets.reshape(-1)
        with m.accessing(tile.threads(lead), space):
            data = arena.read(flat, size, "WMMA tile read")
        tile.count(m, space, False, offsets, lead)
        if tile.which in "ab":
            write(m, lanes, to_words(data.reshape(len(lead), tile.rows, -1), tile.kind))
        else:
            write_matrix(m, lanes, data.view(parse_dtype(tile.kind)).reshape(len(lead), tile.rows, tile.length))

    return run


def _store(i: Instruction) -> Operation:
    tile = _Tile(i, i.operands[0], i.operands[2] if len(i.operands) > 2 else None)
    read = read_sums(i.operands[1], tile.kind, tile.rows, tile.length, i)

    def run(m: ResidentBlocks, lanes: ThreadSet) -> None:
        arena, offsets, lead, space = tile.places(m, lanes)
        values = np.ascontiguousarray(read(m, lanes)).reshape(-1, 1).view(np.uint8)
        flat = offsets.reshape(-1)
        with m.accessing(tile.threads(lead), space):
            arena.write(flat, values, "WMMA tile write")
        tile.count(m, space, True, offsets, lead)

    return run


BUILDERS = {"wmma": wmma}

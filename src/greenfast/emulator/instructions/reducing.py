"""cp.reduce.async.bulk: bulk copies that apply an atomic operation to each element (PTX ISA)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from greenfast.emulator.instructions.access import REDUCTIONS, apply_atomically, atomic_result
from greenfast.emulator.instructions.bulk import Offsets, Tile, count_bulk, read_tiles, require_fenced
from greenfast.emulator.instructions.operands import parse_dtype, parse_type
from greenfast.emulator.machine.blocks import ThreadSet, Values
from greenfast.emulator.machine.in_flight import BulkStore, chunk_indices, hold
from greenfast.emulator.machine.ordering import DEVICE
from greenfast.emulator.machine.state import Operation, ResidentBlocks
from greenfast.emulator.ptx.syntax import Instruction


def reduce(i: Instruction) -> Operation:
    """Build cp.reduce.async.bulk to global memory: a separate atomic operation for each element.

    The operations execute when they are issued; the source is held as for a store.
    """
    to, source, size, *_ = i.operands
    kind = parse_type(i)
    dtype, tiles = parse_dtype(kind), read_tiles(i, source, to, size)
    operation = next(p for p in i.parts if p in REDUCTIONS)

    def run(m: ResidentBlocks, lanes: ThreadSet) -> None:
        for indices, tile in tiles(m, lanes):
            run_tile(m, indices, tile)

    def run_tile(m: ResidentBlocks, indices: NDArray[np.intp], tile: Tile) -> None:
        owners = np.repeat(indices, tile.outer.shape[1] * tile.unit // dtype.itemsize)
        location = tile.shared.ravel()
        with m.accessing(np.broadcast_to(indices[:, None], tile.outer.shape).ravel(), "shared"):
            values = m.shared.read(location, tile.unit, "bulk read", asynchronous=True).ravel().view(dtype)
            require_fenced(m, location, "bulk read")
        offsets = (tile.outer.ravel()[:, None] + np.arange(0, tile.unit, dtype.itemsize)).ravel()
        _reduce_at(m, offsets, values, owners, operation, kind)
        count_bulk(m, True, tile, np.broadcast_to(indices[:, None], tile.outer.shape), tile.outer >= 0)
        chunks = chunk_indices(tile.shared)
        hold(m.shared, chunks)
        nowhere, nothing = np.full(tile.outer.shape, -1), np.zeros((*tile.outer.shape, tile.unit), np.uint8)
        m.stores.append(BulkStore(indices, m.bulk_groups[indices], chunks, nowhere, nothing, m.current))

    return run


def _reduce_at(
    m: ResidentBlocks, offsets: Offsets, values: Values, lanes: NDArray[np.intp], operation: str, kind: str
) -> None:
    """Threads, one for each element, apply an operation to elements of global memory, one after the other."""
    size = values.dtype.itemsize
    with m.accessing(lanes, "global"):
        m.memory.read(offsets, size, f"{size}-byte atomic access", True)
    m.races.atomics.check("global", offsets, size, DEVICE, lock=False)
    m.races.synchronize("global", offsets, lanes, False, True, False, DEVICE)
    after = atomic_result(operation, kind, "global")
    _, changed = apply_atomically(m.memory, offsets, values.dtype, after, [values])
    if changed.any():
        m.access_lanes = lanes[changed]
        m.races.atomics.record("global", offsets[changed], size)

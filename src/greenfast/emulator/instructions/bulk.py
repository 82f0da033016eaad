"""Addresses of bulk copies, with and without a tensor map, and their checks."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from greenfast.emulator.instructions.access import addresses, count_access
from greenfast.emulator.instructions.operands import reader
from greenfast.emulator.machine.blocks import ThreadSet, lane_indices
from greenfast.emulator.machine.memory import CHUNK, OUTSIDE, PARAM_BASE, UNWRITTEN, window
from greenfast.emulator.machine.state import ResidentBlocks
from greenfast.emulator.machine.tensormap import BoundMap, check_replaced, decode, swizzled
from greenfast.emulator.ptx.syntax import Address, Instruction, Operand
from greenfast.spec.errors import UsageError
from greenfast.spec.kernel import MAP_ALIGNMENT, MAP_BYTES

Offsets = NDArray[np.int64]

#: Alignment in shared memory of a tile and of other bulk copies.
TILE_ALIGNMENT, BULK_ALIGNMENT = 128, 16


class Tile:
    """The data that the copies of some threads move: (threads, units) offsets in both memories, ``unit`` bytes each.

    shared: offsets in the arena. outer: offsets in global memory, -1 for units outside of the tensor.
    """

    def __init__(self, shared: Offsets, outer: Offsets, unit: int) -> None:
        self.shared, self.outer, self.unit = shared, outer, unit


def _shared_start(m: ResidentBlocks, addresses: Offsets, lanes: ThreadSet, size: int, alignment: int) -> Offsets:
    """Return the arena offset of ``size`` bytes in each thread's block.

    Report misaligned and out-of-bounds addresses.
    """
    indices = lane_indices(lanes)
    for index in np.flatnonzero(addresses % alignment):
        reason = f"a bulk copy at byte {addresses[index]} of shared memory, not a multiple of {alignment}"
        raise m.fault(reason, int(indices[index]))
    for index in np.flatnonzero((addresses < 0) | (addresses + size > m.shared_bytes)):
        reason = (
            f"a bulk copy of {size} bytes out of bounds at byte {addresses[index]} of {m.shared_bytes} of shared memory"
        )
        raise m.fault(reason, int(indices[index]))
    return addresses + m.shared_start[indices]


def _map_at(m: ResidentBlocks, address: int, lane: int) -> BoundMap:
    """Return the tensor map at an address, generic or of the parameters, in a parameter, a variable or a buffer.

    A map that a thread of the launch wrote needs a fence.proxy.tensormap before it is used.
    """
    space = window(address)
    if space in ("shared", "local"):
        reason = f"a tensor map in {space} memory; it must be in a parameter, in constant or in global memory"
        raise m.fault(f"{reason} (PTX ISA, cp.async.bulk.tensor)", lane)
    memory, base = (m.memory, m.memory.base) if space == "global" else (m.param_memory, PARAM_BASE)
    start = address - base if space != "none" else address
    states = memory.state[start : start + MAP_BYTES] if start >= 0 else memory.state[:0]
    if len(states) < MAP_BYTES or (states == OUTSIDE).any():
        raise m.fault(f"no tensor map at address {address:#x}: this address is in no memory", lane)
    if (states == UNWRITTEN).any():
        raise m.fault(f"a tensor map at address {address:#x}: nothing has written its 128 bytes", lane)
    if address % MAP_ALIGNMENT:
        raise m.fault(f"a tensor map at address {address:#x}, not a multiple of {MAP_ALIGNMENT}", lane)
    tensor = decode(memory.data[start : start + MAP_BYTES].tobytes(), m.memory.base)
    if tensor is None:
        reason = f"a tensor map at address {address:#x}: the 128 bytes there are none of an argument (give it as a "
        raise m.limit(f"{reason}TensorMap, in a Struct too, or as --arg map:...)", lane)
    if space == "global":
        m.races.require_tensormap_fence(start, lane)
    try:
        check_replaced(memory.data[start : start + MAP_BYTES].tobytes())
    except UsageError as e:
        raise m.fault(str(e), lane) from None
    return tensor


def _tensor_tile(m: ResidentBlocks, tensor: BoundMap, start: Offsets, corner: Offsets) -> Tile:
    """Return the tiles of copies between shared memory at ``start`` and boxes at ``corner`` (threads, dimensions)."""
    copies = len(start)
    item = tensor.item
    unit = CHUNK if tensor.shape[0] * item % CHUNK == 0 else item
    per_row = tensor.box[0] * item // unit
    first = corner[:, :1] * item + np.arange(per_row) * unit  # byte in the innermost dimension
    inside = (first >= 0) & (first < tensor.shape[0] * item)
    offsets = first
    for n in range(1, len(tensor.box)):
        index = corner[:, n : n + 1] + np.arange(tensor.box[n])
        good = (index >= 0) & (index < tensor.shape[n])
        offsets = (index * tensor.strides[n])[:, :, None] + offsets[:, None, :]
        inside = good[:, :, None] & inside[:, None, :]
        offsets, inside = offsets.reshape(copies, -1), inside.reshape(copies, -1)
    outer = np.where(inside, offsets + tensor.start, -1)
    linear = np.arange(outer.shape[1]) * unit
    shared = start[:, None] + linear
    if tensor.swizzle:
        base = start // m.shared_stride * m.shared_stride
        shared = base[:, None] + swizzled(shared - base[:, None], tensor.swizzle)
    return Tile(shared, outer, unit)


def read_tiles(
    i: Instruction, shared: Operand, outer: Operand, size: Operand | None
) -> Callable[[ResidentBlocks, ThreadSet], Iterator[tuple[NDArray[np.intp], Tile]]]:
    """Build a function that returns the tile of each copy, for threads with the same form of copy (size or tensor map).

    size: of a copy without a tensor map.
    """
    here, there = addresses(shared, i), addresses(outer, i)
    tile = _tensor_tiles(i, outer) if size is None else _plain_tile
    amount = there if size is None else reader(size, "u32", i)

    def run(m: ResidentBlocks, lanes: ThreadSet) -> Iterator[tuple[NDArray[np.intp], Tile]]:
        indices = lane_indices(lanes)
        forms = np.broadcast_to(np.asarray(amount(m, lanes)), len(indices)).astype(np.int64)
        start, outward = here(m, lanes), there(m, lanes)
        for form in np.unique(forms).tolist():
            mine = forms == form
            yield indices[mine], tile(m, indices[mine], form, start[mine], outward[mine])

    return run


def _plain_tile(m: ResidentBlocks, indices: NDArray[np.intp], length: int, start: Offsets, outward: Offsets) -> Tile:
    """Return the tile of copies of ``length`` bytes."""
    if length % BULK_ALIGNMENT:
        raise m.fault(f"a bulk copy of {length} bytes, not a multiple of 16", int(indices[0]))
    start = _shared_start(m, start, indices, length, BULK_ALIGNMENT)
    outward = outward - m.memory.base
    for index in np.flatnonzero(outward % BULK_ALIGNMENT):
        where = m.memory.describe(int(outward[index]))
        raise m.fault(f"a bulk copy at {where}, not a multiple of 16", int(indices[index]))
    chunks = np.arange(0, length, CHUNK)
    return Tile(start[:, None] + chunks, outward[:, None] + chunks, CHUNK)


def _tensor_tiles(
    i: Instruction, outer: Operand
) -> Callable[[ResidentBlocks, NDArray[np.intp], int, Offsets, Offsets], Tile]:
    """Build a function that gives the tiles of copies through the tensor map at an address."""
    assert isinstance(outer, Address)
    rank = int(next(p for p in i.parts if p in ("1d", "2d", "3d", "4d", "5d"))[0])
    coordinates = [reader(c, "s32", i) for c in outer.coordinates]

    def tile(m: ResidentBlocks, indices: NDArray[np.intp], address: int, start: Offsets, outward: Offsets) -> Tile:
        tensor = _map_at(m, address, int(indices[0]))
        if len(tensor.box) != rank or len(coordinates) != rank:
            reason = f"a copy of {rank} dimensions with {len(coordinates)} coordinates"
            reason += f", its tensor map has {len(tensor.box)}; .dim is the number of dimensions of the tensor"
            raise m.fault(f"{reason} (PTX ISA, cp.async.bulk.tensor)", int(indices[0]))
        start = _shared_start(m, start, indices, tensor.box_bytes, TILE_ALIGNMENT)
        corner = np.stack([np.broadcast_to(c(m, indices), len(indices)) for c in coordinates], axis=1).astype(np.int64)
        for index in np.flatnonzero(corner[:, 0] * tensor.item % BULK_ALIGNMENT):
            # The PTX ISA and the driver's manual ask it of the tensor's address and strides only; Hopper answers such
            # coordinates with an illegal instruction (H100, 2026-11-21; triton-lang/triton issue 7385 of a load,
            # tile-ai/tilelang pull request 2681 of a store).
            reason = f"a tensor copy at {corner[index, 0]} of the innermost dimension, elements of {tensor.item} bytes"
            raise m.fault(f"{reason}; a tile must begin at a multiple of 16 bytes there", int(indices[index]))
        return _tensor_tile(m, tensor, start, corner)

    return tile


def require_fenced(m: ResidentBlocks, location: Offsets, access: str) -> None:
    """Raise a fault if a bulk access has no proxy fence after earlier generic accesses to the same places."""
    source = m.current.source
    if m.proxies is not None and not (source is not None and source.memcpy_async):
        m.proxies.require_fenced(location, np.array([m.races.warp]), access, access == "bulk write")


def count_bulk(m: ResidentBlocks, store: bool, tile: Tile, owners: NDArray[np.intp], inside: NDArray[np.bool_]) -> None:
    """Count the accesses to global memory."""
    count_access(m, "global", store, tile.outer[inside], owners[inside], tile.unit)

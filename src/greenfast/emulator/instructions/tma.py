"""Bulk copies: cp.async.bulk with and without tensor maps, their groups, and the fences of their proxy.

Facts: PTX ISA, "cp.async.bulk" and "Async proxy".

A load is delivered, and counted at its mbarrier, at a moment after its issue that the scheduler chooses; until then
its destination can be neither read nor written. A store's source cannot be written until its thread waits for its
group, and its destination not be read until a wait without .read. A reducing copy's atomic operations happen when it is
issued.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from greenfast.emulator.instructions.access import asynchronous_copy, land, parse_space
from greenfast.emulator.instructions.bulk import Tile, count_bulk, read_tiles, require_fenced
from greenfast.emulator.instructions.mbarrier import faults, find_mbarriers
from greenfast.emulator.instructions.operands import do_nothing, parse_constant, reader
from greenfast.emulator.instructions.reducing import reduce
from greenfast.emulator.machine.blocks import ThreadSet, lane_indices
from greenfast.emulator.machine.in_flight import BulkLoad, BulkStore, chunk_indices, hold
from greenfast.emulator.machine.memory import CHUNK, IN_FLIGHT, WRITTEN
from greenfast.emulator.machine.state import Operation, ResidentBlocks
from greenfast.emulator.ptx.syntax import Instruction

_BARRIER_BYTES = 8


def copy(i: Instruction) -> Operation:
    """Build cp.async of any kind."""
    if i.parts[:2] == ("async", "mbarrier"):
        return _arrive_when_landed(i)
    if "bulk" not in i.parts:
        return asynchronous_copy(i)
    if i.parts[0] == "reduce":
        return reduce(i)
    if "commit_group" in i.parts:
        return _commit
    if "wait_group" in i.parts:
        return _wait(i)
    if "prefetch" in i.parts:
        return do_nothing
    return (_store if "bulk_group" in i.parts else _load)(i, "tensor" in i.parts)


def _arrive_when_landed(i: Instruction) -> Operation:
    """Build cp.async.mbarrier.arrive: the threads' earlier cp.async land, and arrive, when the scheduler chooses."""
    barrier = find_mbarriers(i.operands[0], i, parse_space(i))
    increases = "noinc" not in i.parts

    def run(m: ResidentBlocks, lanes: ThreadSet) -> None:
        indices, rows, issued = lane_indices(lanes), barrier(m, lanes), m.copies_issued
        if increases:  # the arrival is one more than the phase expects
            with faults(m, lanes):
                m.mbarriers.await_more(rows)

        def deliver() -> None:
            land(m, indices, lambda copy: copy.number < issued)
            m.races.arrive_at(rows, indices)
            m.mbarriers.arrive(rows, np.ones(len(rows), np.int64))

        m.arriving.append(BulkLoad(indices, rows, m.current, deliver))

    return run


# ---- loads ----------------------------------------------------------------------------------------------------------


def _load(i: Instruction, tensor: bool) -> Operation:
    to, source, *remainder = i.operands
    size = None if tensor else remainder.pop(0)
    tiles = read_tiles(i, to, source, size)
    barrier = find_mbarriers(remainder.pop(0), i, "shared")
    mask = reader(remainder[0], "u16", i) if "multicast:cluster" in i.parts else None

    def run(m: ResidentBlocks, lanes: ThreadSet) -> None:
        for indices, tile in tiles(m, lanes):
            load(m, indices, tile)

    def load(m: ResidentBlocks, indices: NDArray[np.intp], tile: Tile) -> None:
        rows = barrier(m, indices)
        copies, apart = _targets(m, indices, None if mask is None else mask(m, indices))
        rows = rows[copies] + apart // _BARRIER_BYTES
        hidden = ~m.mbarriers.visible[rows]
        if hidden.any():
            reason = "an mbarrier with neither a fence (mbarrier_init, proxy.async) nor a barrier since its init"
            reason += ", used by a bulk copy"
            m.report_formal("hidden-mbarrier", reason, int(indices[copies[np.flatnonzero(hidden)[0]]]))
        inside = tile.outer >= 0
        values = np.zeros((*tile.outer.shape, tile.unit), np.uint8)
        owners = np.broadcast_to(indices[:, None], tile.outer.shape)
        with m.accessing(owners[inside], "global"):
            values[inside] = m.memory.read(tile.outer[inside], tile.unit, "bulk read")
        location = (tile.shared[copies] + apart[:, None]).ravel()
        data = values[copies].reshape(-1, tile.unit)
        with m.accessing(owners[copies].ravel(), "shared"):
            m.shared.require_free(location, tile.unit, "bulk write")
            m.shared.mark(location, tile.unit, IN_FLIGHT, "bulk write")
            if m.shared.on_write is not None:
                m.shared.on_write(location, tile.unit, None)
            require_fenced(m, location, "bulk write")
        count_bulk(m, False, tile, owners, inside)
        total = tile.outer.shape[1] * tile.unit

        def land() -> None:
            m.shared.data.reshape(-1, tile.unit)[location // tile.unit] = data
            m.shared.state.reshape(-1, tile.unit)[location // tile.unit] = WRITTEN
            if m.proxies is not None:
                m.proxies.clear_writes(location)
            m.races.arrive_at(rows, indices[copies])
            m.mbarriers.expect(rows, np.full(len(rows), -total))
            m.mbarriers.changes += 1

        m.arriving.append(BulkLoad(indices, rows, m.current, land))

    return run


def _targets(m: ResidentBlocks, indices: NDArray[np.intp], masks: Any) -> tuple[NDArray[np.intp], NDArray[np.int64]]:
    """Return the thread of each arriving copy, and the distance in bytes from its own block's shared memory.

    masks: the destination blocks in the cluster of each thread's copy; None: its own block.
    """
    if masks is None:
        return np.arange(len(indices)), np.zeros(len(indices), np.int64)
    size = m.geometry.cluster_size
    chosen = np.broadcast_to(np.asarray(masks).astype(np.int64), len(indices))
    for index in np.flatnonzero((chosen == 0) | (chosen >> size != 0)):
        raise m.fault(f"a multicast to blocks {int(chosen[index]):#b} of a cluster of {size}", int(indices[index]))
    copies, ranks = np.nonzero(chosen[:, None] >> np.arange(size) & 1)
    return copies, (ranks - m.block_of[indices[copies]] % size) * m.shared_stride


# ---- stores ---------------------------------------------------------------------------------------------------------


def _store(i: Instruction, tensor: bool) -> Operation:
    to, source, *remainder = i.operands
    tiles = read_tiles(i, source, to, None if tensor else remainder[0])

    def run(m: ResidentBlocks, lanes: ThreadSet) -> None:
        for indices, tile in tiles(m, lanes):
            store(m, indices, tile)

    def store(m: ResidentBlocks, indices: NDArray[np.intp], tile: Tile) -> None:
        owners = np.broadcast_to(indices[:, None], tile.outer.shape)
        location = tile.shared.ravel()
        with m.accessing(owners.ravel(), "shared"):
            values = m.shared.read(location, tile.unit, "bulk read", asynchronous=True)
            require_fenced(m, location, "bulk read")
        inside = tile.outer >= 0
        if tensor:
            _require_whole_chunks(m, tile, owners)
        if inside.any():  # a box may be wholly outside of the tensor
            for other in m.stores:  # some kernels store a tile twice
                other.settle(m.memory, tile.outer[inside], values[inside.ravel()])
            with m.accessing(owners[inside], "global"):
                m.memory.require_free(tile.outer[inside], tile.unit, "bulk write")
                m.memory.mark(tile.outer[inside], tile.unit, IN_FLIGHT, "bulk write")
                m.races.write_global(tile.outer[inside], tile.unit, values[inside.ravel()])
        count_bulk(m, True, tile, owners, inside)
        chunks = chunk_indices(tile.shared)
        hold(m.shared, chunks)
        m.stores.append(
            BulkStore(
                lanes=indices,
                groups=m.bulk_groups[indices],
                chunks=chunks,
                offsets=tile.outer,
                values=values.reshape(*tile.outer.shape, tile.unit),
                instruction=m.current,
            )
        )

    return run


def _require_whole_chunks(m: ResidentBlocks, tile: Tile, owners: NDArray[np.intp]) -> None:
    """Report a tensor row that ends within 16 bytes that a store writes partly.

    An H100 writes the whole chunk (seen 2026-11-21, tests/gpu/test_hopper_kernels.py), and so bytes outside of the
    tensor. The values that it writes there are not known.
    """
    chunks = tile.outer.reshape(-1, CHUNK // tile.unit) >= 0
    cut = np.flatnonzero(chunks.any(axis=1) & ~chunks.all(axis=1))
    if len(cut):
        lane = int(owners.reshape(-1, CHUNK // tile.unit)[cut[0], 0])
        raise m.fault(
            "a tensor store to a row that ends within 16 bytes: a GPU also writes the bytes after the row", lane
        )


def _commit(m: ResidentBlocks, lanes: ThreadSet) -> None:
    m.bulk_groups[lanes] += 1


def _wait(i: Instruction) -> Operation:
    """Build cp.async.bulk.wait_group.

    At the first try, other threads run first, to expose accesses to data in flight.
    """
    allowed = parse_constant(i.operands[0], i)
    only_read = "read" in i.parts

    def run(m: ResidentBlocks, lanes: ThreadSet) -> Any:
        indices = lane_indices(lanes)
        waiting = np.zeros(m.lanes, np.bool_)
        waiting[lanes] = True
        covered = [waiting[s.lanes] & (s.groups < m.bulk_groups[s.lanes] - allowed) for s in m.stores]
        first = np.zeros(m.lanes, np.bool_)
        for s, selected in zip(m.stores, covered, strict=True):
            first[s.lanes[selected & (s.reading | ~s.landed)]] = True
        first &= ~m.has_yielded
        stay = indices[first[indices]]
        if len(stay):
            m.has_yielded[stay] = True
            m.events += 1
            waiting[stay] = False
        for s, selected in zip(m.stores, covered, strict=True):
            now = selected & waiting[s.lanes]
            reading = now & s.reading
            if reading.any():
                owners = np.broadcast_to(s.lanes[reading][:, None], s.chunks[reading].shape).ravel()
                m.races.record_finished(s.chunks[reading].ravel() * CHUNK, CHUNK, owners, False, s.instruction)
            s.release(m.shared, now)
            if not only_read:
                s.land(m.memory, now)
        m.stores = [s for s in m.stores if s.reading.any() or not s.landed.all()]
        m.has_yielded[waiting] = False
        return stay

    return run


def finish(m: ResidentBlocks) -> None:
    """Complete the stores after all threads have ended. Report copies that may still write to a block's shared memory.

    A copy that may still read it is a formal finding: another block may get the memory before the copy has read it.
    """
    for load in m.arriving:
        m.current = load.instruction
        raise m.fault(
            "ended before a bulk copy to shared memory was delivered, nothing waits for it", int(load.lanes[0])
        )
    for s in m.stores:
        for index in np.flatnonzero(s.reading):
            m.current = s.instruction
            reason = "ended while a bulk store may still read shared memory, no cp.async.bulk.wait_group covers it"
            m.report_formal("bulk-store-not-awaited", reason, int(s.lanes[index]))
        s.land(m.memory, np.ones(len(s.lanes), np.bool_))


BUILDERS = {"cp": copy}

"""Thread block clusters: mapa, getctarank, barrier.cluster, st.async (PTX ISA); and cache policies."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from greenfast.emulator.instructions import access
from greenfast.emulator.instructions.access import addresses, locate
from greenfast.emulator.instructions.mbarrier import find_mbarriers
from greenfast.emulator.instructions.operands import list_items, parse_dtype, parse_type, reader, writer
from greenfast.emulator.machine.blocks import ThreadSet, lane_count, lane_indices
from greenfast.emulator.machine.in_flight import BulkLoad
from greenfast.emulator.machine.memory import IN_FLIGHT, SHARED_BASE, WRITTEN, window
from greenfast.emulator.machine.state import RANK_BITS, Operation, ResidentBlocks
from greenfast.emulator.ptx.syntax import Instruction


def mapa(i: Instruction) -> Operation:
    """Build mapa: the address of a variable in the shared memory of a block of the cluster."""
    kind = parse_type(i)
    generic = not any(p.startswith("shared") for p in i.parts)
    read, rank, write = reader(i.operands[1], kind, i), reader(i.operands[2], "u32", i), writer(i.operands[0], kind, i)

    def run(m: ResidentBlocks, lanes: ThreadSet) -> None:
        size = m.geometry.cluster_size
        ranks = np.broadcast_to(np.asarray(rank(m, lanes)).astype(np.int64), lane_count(lanes))
        for index in np.flatnonzero(ranks >= size):
            reason = f"mapa to block {ranks[index]} of a cluster of {size} block{'s' if size > 1 else ''}"
            raise m.fault(reason, int(lane_indices(lanes)[index]))
        result = np.broadcast_to(np.asarray(read(m, lanes)).astype(np.int64), lane_count(lanes))
        base = SHARED_BASE if generic else 0
        if generic and any(window(int(a)) != "shared" for a in np.unique(result >> 32) << 32):
            raise m.fault("mapa of a generic address that is not in shared memory", int(lane_indices(lanes)[0]))
        if size > 1:
            result = base + (((ranks + 1) << RANK_BITS) | ((result - base) & ((1 << RANK_BITS) - 1)))
        write(m, lanes, result.astype(parse_dtype(kind)))

    return run


def read_rank(i: Instruction) -> Operation:
    """Build getctarank: the block of the cluster that an address belongs to."""
    kind = parse_type(i)
    generic = not any(p.startswith("shared") for p in i.parts)
    read, write = reader(i.operands[1], kind, i), writer(i.operands[0], "u32", i)

    def run(m: ResidentBlocks, lanes: ThreadSet) -> None:
        result = np.broadcast_to(np.asarray(read(m, lanes)).astype(np.int64), lane_count(lanes))
        named = (result - (SHARED_BASE if generic else 0)) >> RANK_BITS
        own = m.block_of[lanes] % m.geometry.cluster_size
        write(m, lanes, np.where(named > 0, named - 1, own).astype(np.uint32))

    return run


def barrier(i: Instruction) -> Operation:
    """Build barrier.cluster.arrive and wait: every thread of the cluster arrives once per phase."""
    if i.parts[1] == "wait":
        return _wait
    relaxed = "relaxed" in i.parts
    return lambda m, lanes: _arrive(m, lanes, relaxed)


def _arrive(m: ResidentBlocks, lanes: ThreadSet, relaxed: bool) -> None:
    twice = m.cluster_arrivals[lanes] != m.cluster_waits[lanes]
    if twice.any():
        index = int(lane_indices(lanes)[np.flatnonzero(twice)[0]])
        raise m.fault("a second arrival at the cluster barrier with no wait between", index)
    m.cluster_arrivals[lanes] += 1
    m.cluster_relaxed[lanes] = relaxed
    m.races.warp_sync.arrive(lanes, m.races.ordering.now)
    m.events += 1
    _phases(m)


def _wait(m: ResidentBlocks, lanes: ThreadSet) -> Any:
    indices, size = lane_indices(lanes), m.geometry.cluster_size
    early = _phases(m)[m.block_of[indices] // size] <= m.cluster_waits[indices]
    m.cluster_waits[indices[~early]] += 1
    m.cluster_met[m.block_of[indices[~early]]] = True
    gone = indices[~early]
    m.races.warp_sync.join_all(gone, m.cluster_met_at[m.block_of[gone] // size])
    m.races.warp_sync.wait(gone, m.races.ordering.now)
    for first in np.unique(m.block_of[indices[~early]] // size) * size:
        blocks = np.arange(first, first + size)
        m.races.ordering.sync_cluster(blocks, int(m.cluster_met_at[first // size]))
        if not m.cluster_relaxed[np.isin(m.block_of, blocks)].any():
            m.mbarriers.show(blocks, len(m.blocks))
    return indices[early]


def _phases(m: ResidentBlocks) -> NDArray[np.int64]:
    """Return the number of completed barriers per cluster, and record the last access before each."""
    size = m.geometry.cluster_size
    # A thread that has ended counts as one that arrived.
    phase = np.full(len(m.blocks) // size, np.iinfo(np.int64).max)
    there = np.flatnonzero(m.exists & ~m.ended)
    np.minimum.at(phase, m.block_of[there] // size, m.cluster_arrivals[there])
    m.cluster_met_at[phase > m.cluster_phases] = m.races.ordering.now
    m.cluster_phases = np.maximum(m.cluster_phases, phase)
    return phase


def store(i: Instruction) -> Operation:
    """Build st and st.async: data arrives in a block's shared memory later, and then counts at an mbarrier."""
    if "async" not in i.parts:
        return access.store(i)
    kind = parse_type(i)
    read, dtype = [reader(item, kind, i) for item in list_items(i.operands[1])], parse_dtype(kind)
    where, barriers = addresses(i.operands[0], i), find_mbarriers(i.operands[2], i, "shared")
    size = dtype.itemsize * len(read)

    def run(m: ResidentBlocks, lanes: ThreadSet) -> None:
        indices = lane_indices(lanes)
        arena, offsets, _ = locate(m, "shared", where(m, lanes), lanes)
        rows = barriers(m, lanes)
        apart = np.flatnonzero(rows * 8 // m.shared_stride != offsets // m.shared_stride)
        if len(apart):
            raise m.fault("st.async to another block than its mbarrier's", int(indices[apart[0]]))
        values = np.empty((len(offsets), len(read)), dtype)
        for n, r in enumerate(read):
            values[:, n] = r(m, lanes)
        with m.accessing(lanes, "shared"):
            arena.require_free(offsets, size, f"{size}-byte asynchronous write")
            arena.mark(offsets, size, IN_FLIGHT, f"{size}-byte asynchronous write")

        def land() -> None:
            data = np.ascontiguousarray(values).view(np.uint8)
            arena.data.reshape(-1, size)[offsets // size] = data
            arena.state.reshape(-1, size)[offsets // size] = WRITTEN
            m.mbarriers.expect(rows, np.full(len(rows), -size))
            m.mbarriers.changes += 1

        m.arriving.append(BulkLoad(indices, rows, m.current, land))

    return run


def policy(i: Instruction) -> Operation:
    """Build createpolicy: a cache hint without effect here."""
    write = writer(i.operands[0], "b64", i)
    return lambda m, lanes: write(m, lanes, np.zeros(lane_count(lanes), np.uint64))


BUILDERS = {"mapa": mapa, "getctarank": read_rank, "st": store, "createpolicy": policy}

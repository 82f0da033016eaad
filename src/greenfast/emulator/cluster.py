"""Thread block clusters, of one block each: mapa, getctarank, barrier.cluster (PTX ISA); and cache policies."""

from __future__ import annotations

from typing import Any

import numpy as np

from greenfast.emulator.machine import Lanes, Machine, Operation, lane_count, lane_indices
from greenfast.emulator.operands import reader, type_of, unsupported, writer
from greenfast.emulator.ptx import Instruction


def mapa(i: Instruction) -> Operation:
    """mapa: the address of a variable in the shared memory of another block of the cluster, here always the own."""
    kind = type_of(i)
    read, rank, write = reader(i.operands[1], kind, i), reader(i.operands[2], "u32", i), writer(i.operands[0], kind, i)

    def run(m: Machine, lanes: Lanes) -> None:
        ranks = np.broadcast_to(np.asarray(rank(m, lanes)), lane_count(lanes))
        if ranks.any():
            at = int(np.flatnonzero(ranks)[0])
            raise m.fault(f"mapa to block {ranks[at]} of a cluster of one block", int(lane_indices(lanes)[at]))
        write(m, lanes, read(m, lanes))

    return run


def rank_of(i: Instruction) -> Operation:
    """getctarank: the block of the cluster that an address belongs to."""
    write = writer(i.operands[0], "u32", i)
    return lambda m, lanes: write(m, lanes, np.zeros(lane_count(lanes), np.uint32))


def barrier(i: Instruction) -> Operation:
    """barrier.cluster.arrive and wait: every thread of the cluster arrives once per phase."""
    if i.parts[1] == "arrive":
        return _arrive
    if i.parts[1] == "wait":
        return _wait
    raise unsupported(i)


def _arrive(m: Machine, lanes: Lanes) -> None:
    twice = m.cluster_arrivals[lanes] != m.cluster_waits[lanes]
    if twice.any():
        at = int(lane_indices(lanes)[np.flatnonzero(twice)[0]])
        raise m.fault("a second arrival at the cluster barrier with no wait between", at)
    m.cluster_arrivals[lanes] += 1
    m.events += 1


def _wait(m: Machine, lanes: Lanes) -> Any:
    indices = lane_indices(lanes)
    # A thread that has ended counts as one that arrived.
    phase = np.full(len(m.blocks), np.iinfo(np.int64).max)
    there = np.flatnonzero(m.exists & ~m.ended)
    np.minimum.at(phase, m.block_of[there], m.cluster_arrivals[there])
    early = phase[m.block_of[indices]] <= m.cluster_waits[indices]
    m.cluster_waits[indices[~early]] += 1
    return indices[early]


def policy(i: Instruction) -> Operation:
    """createpolicy: a hint for the cache, which is not modelled."""
    write = writer(i.operands[0], "b64", i)
    return lambda m, lanes: write(m, lanes, np.zeros(lane_count(lanes), np.uint64))


BUILDERS = {"mapa": mapa, "getctarank": rank_of, "createpolicy": policy}

"""mbarrier instructions (PTX ISA, "mbarrier"): asynchronous barriers with phases and transaction bytes.

A wait for a phase that has not completed holds its threads until something changes. Now and then it gives up at once,
as the hardware may, so that code that ignores the result is found. When nothing else can go on, all waits give up; if
nothing comes of that, the kernel is deadlocked.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from greenfast.emulator.instructions.access import addresses, locate, parse_space
from greenfast.emulator.instructions.operands import reader, writer
from greenfast.emulator.machine.blocks import ThreadSet, Values, lane_count, lane_indices
from greenfast.emulator.machine.mbarriers import PENDING, PHASE_SHIFT, MbarrierError, Rows
from greenfast.emulator.machine.memory import BARRIER, UNUSED_BARRIER, UNWRITTEN
from greenfast.emulator.machine.state import Operation, ResidentBlocks
from greenfast.emulator.ptx.syntax import Instruction, Operand

#: How many of the waits for a phase that has not completed give up at once.
GIVES_UP = 0.25
_SIZE = 8


@contextlib.contextmanager
def faults(m: ResidentBlocks, lanes: ThreadSet) -> Iterator[None]:
    """Turn an illegal mbarrier operation into the fault of its thread."""
    try:
        yield
    except MbarrierError as e:
        lane = int(lane_indices(lanes)[e.position])
        raise m.fault(e.reason, lane) from None


def find_mbarriers(operand: Operand, i: Instruction, space: str) -> Callable[[ResidentBlocks, ThreadSet], Rows]:
    """Build a function that returns each thread's initialised mbarrier, as a word index in shared memory."""
    where = _words(operand, i, space)

    def run(m: ResidentBlocks, lanes: ThreadSet) -> Rows:
        rows = where(m, lanes)
        with faults(m, lanes):
            m.mbarriers.require(rows)
        states = m.shared.state.reshape(-1, _SIZE)
        used = (states[rows] == BARRIER).all(axis=1)
        if not used.all():
            overwritten = np.flatnonzero(~used & (states[rows] != UNUSED_BARRIER).any(axis=1))
            if len(overwritten):
                raise m.fault("an mbarrier that was overwritten", int(lane_indices(lanes)[overwritten[0]]))
            states[rows] = BARRIER
        return rows

    return run


def _words(operand: Operand, i: Instruction, space: str) -> Callable[[ResidentBlocks, ThreadSet], Rows]:
    where = addresses(operand, i)

    def run(m: ResidentBlocks, lanes: ThreadSet) -> Rows:
        _, offsets, actual = locate(m, space, where(m, lanes), lanes)
        if actual != "shared":
            raise m.fault("an mbarrier outside of shared memory", int(lane_indices(lanes)[0]))
        odd = offsets % _SIZE != 0
        if odd.any():
            index = int(np.flatnonzero(odd)[0])
            raise m.fault("an mbarrier at an address that is not a multiple of 8", int(lane_indices(lanes)[index]))
        rows: Rows = offsets // _SIZE
        return rows

    return run


def _integers(values: Values, lanes: ThreadSet) -> NDArray[np.int64]:
    return np.broadcast_to(np.asarray(values).astype(np.int64), lane_count(lanes))


def init(i: Instruction) -> Operation:
    """Build mbarrier.init."""
    where, count = _words(i.operands[0], i, parse_space(i)), reader(i.operands[1], "u32", i)

    def run(m: ResidentBlocks, lanes: ThreadSet) -> None:
        rows = where(m, lanes)
        with faults(m, lanes):
            m.mbarriers.init(rows, _integers(count(m, lanes), lanes))
        m.shared.state.reshape(-1, _SIZE)[rows] = UNUSED_BARRIER

    return run


def invalidate(i: Instruction) -> Operation:
    """Build mbarrier.inval: the memory may be used for something else."""
    where = find_mbarriers(i.operands[0], i, parse_space(i))

    def run(m: ResidentBlocks, lanes: ThreadSet) -> None:
        rows = where(m, lanes)
        m.mbarriers.live[rows] = False
        m.shared.state.reshape(-1, _SIZE)[rows] = UNWRITTEN

    return run


def transactions(i: Instruction) -> Operation:
    """Build mbarrier.expect_tx and mbarrier.complete_tx."""
    where, count = find_mbarriers(i.operands[0], i, parse_space(i)), reader(i.operands[1], "u32", i)
    sign = 1 if i.parts[0] == "expect_tx" else -1

    def run(m: ResidentBlocks, lanes: ThreadSet) -> None:
        rows = where(m, lanes)
        with faults(m, lanes):
            m.mbarriers.expect(rows, sign * _integers(count(m, lanes), lanes))

    return run


def arrive(i: Instruction) -> Operation:
    """Build mbarrier.arrive and arrive_drop, with .expect_tx and .noComplete; they return the state before them."""
    operands = list(i.operands)
    # A remote arrival returns no state, and may be written without a place for one.
    token = operands.pop(0) if not hasattr(operands[0], "offset") else None
    where = find_mbarriers(operands[0], i, parse_space(i))
    amount = reader(operands[1], "u32", i) if len(operands) > 1 else None
    write = writer(token, "b64", i) if token is not None else None
    relaxed = "relaxed" in i.parts
    expects, drops, open_ = "expect_tx" in i.parts, i.parts[0] == "arrive_drop", "noComplete" in i.parts

    def run(m: ResidentBlocks, lanes: ThreadSet) -> None:
        rows = where(m, lanes)
        counts = _integers(np.ones((), np.uint32) if amount is None else amount(m, lanes), lanes)
        state = m.mbarriers.state(rows)
        m.races.arrive_at(rows, lanes, relaxed)
        with faults(m, lanes):
            if expects:
                m.mbarriers.expect(rows, counts)
                counts = np.ones(len(rows), np.int64)
            m.mbarriers.arrive(rows, counts, drops)
            if open_ and (m.mbarriers.state(rows) >> PHASE_SHIFT != state >> PHASE_SHIFT).any():
                raise MbarrierError("an arrival with .noComplete that completes the phase", 0)
        if write is not None:
            write(m, lanes, state)

    return run


def wait(i: Instruction) -> Operation:
    """Build mbarrier.try_wait and test_wait, for a parity or for the state that an arrival returned."""
    where = find_mbarriers(i.operands[1], i, parse_space(i))
    parity, relaxed = "parity" in i.parts, "relaxed" in i.parts
    phase = reader(i.operands[2], "u32" if parity else "u64", i)
    write = writer(i.operands[0], "pred", i)

    def run(m: ResidentBlocks, lanes: ThreadSet) -> Any:
        rows = where(m, lanes)
        wanted = _integers(phase(m, lanes), lanes)
        if parity and (wanted >> 1).any():
            index = int(np.flatnonzero(wanted >> 1)[0])
            raise m.fault(f"a phase parity of {wanted[index]}, neither 0 nor 1", int(lane_indices(lanes)[index]))
        done = m.mbarriers.passed(rows, wanted) if parity else m.mbarriers.phase[rows] > wanted >> PHASE_SHIFT
        if done.any():
            m.races.wait_for(rows[done], lane_indices(lanes)[done], relaxed)
        if done.all() or m.random.random() < GIVES_UP:
            write(m, lanes, done)
            return None
        indices = lane_indices(lanes)
        goes_on = done | m.timing_out[indices]
        m.timing_out[indices] = False
        write(m, indices[goes_on], done[goes_on])
        m.waiting_mbarrier[indices] = rows
        return indices[~goes_on]

    return run


def pending_count(i: Instruction) -> Operation:
    """Build mbarrier.pending_count: of the state that an arrival returned."""
    read, write = reader(i.operands[1], "u64", i), writer(i.operands[0], "b32", i)
    return lambda m, lanes: write(m, lanes, (np.asarray(read(m, lanes)) & PENDING).astype(np.uint32))


_ACTIONS: dict[str, Callable[[Instruction], Operation]] = {
    "init": init,
    "inval": invalidate,
    "expect_tx": transactions,
    "complete_tx": transactions,
    "arrive": arrive,
    "arrive_drop": arrive,
    "try_wait": wait,
    "test_wait": wait,
    "pending_count": pending_count,
}


def mbarrier(i: Instruction) -> Operation:
    """Build any mbarrier instruction."""
    return _ACTIONS[i.parts[0]](i)


def describe(m: ResidentBlocks, row: int) -> str:
    """Describe an mbarrier by its place and its pending arrivals."""
    return f"the mbarrier at {m.describe_shared(row * _SIZE)}, {m.mbarriers.describe(row)}"


BUILDERS = {"mbarrier": mbarrier}

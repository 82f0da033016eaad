"""Loops that wait for other threads, and detection of deadlocks.

A warp runs until it waits or ends. A loop with reads of memory that others may write (atomics, volatile and acquire
loads) yields after each iteration, other loops after many iterations. A round of all warps is quiet if no memory,
barrier or thread changed. The blocks are deadlocked if the registers, too, are as in an earlier quiet round, with no
change in between.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator

import numpy as np

from greenfast.emulator.machine.blocks import ThreadSet, lane_indices
from greenfast.emulator.machine.state import ResidentBlocks
from greenfast.emulator.ptx.syntax import Function, Instruction, Symbol

#: Iterations of a loop after which its warp lets others run.
MAX_ITERATIONS = 4096
#: Weight of an iteration in a loop that yields and has no exit.
ENDLESS_WEIGHT = 16
#: Instructions of a warp, with no barrier and no end of a thread meanwhile, after which it counts as endless.
MAX_SILENT_INSTRUCTIONS = 500_000
#: Cost of an iteration of a yielding loop, in instructions.
POLL_COST = 100
#: Instructions of a warp with diverging threads before it yields.
MAX_DIVERGED_INSTRUCTIONS = 100_000
#: Quiet rounds after which a wait counts as endless although a register still changes, such as a count of the tries.
MAX_QUIET_ROUNDS = 200_000
#: Iterations without success after which a loop lets the other threads of its warp run first.
MAX_FAILED_POLLS = 2
_STRONG = {"volatile", "relaxed", "acquire", "mmio"}


def find_polling_branches(function: Function) -> set[int]:
    """Return the backward branches of loops that read memory that other threads may write meanwhile."""
    reads = np.cumsum([0, *(is_polled(i) for i in function.code)])
    return {pc for pc, start in _backward_branches(function) if reads[pc + 1] > reads[start]}


def find_endless_branches(function: Function) -> set[int]:
    """Return the backward branches of loops without an exit."""
    code = function.code
    return {
        pc
        for pc, start in _backward_branches(function)
        if code[pc].guard is None and not any(_leaves(function, i, start, pc) for i in code[start:pc])
    }


def _backward_branches(function: Function) -> Iterator[tuple[int, int]]:
    """Yield each branch to an earlier instruction or itself, and that instruction."""
    for pc, i in enumerate(function.code):
        target = i.operands[0] if i.name == "bra" and i.operands else None
        if isinstance(target, Symbol) and function.labels.get(target.name, pc + 1) <= pc:
            yield pc, function.labels[target.name]


def _leaves(function: Function, i: Instruction, start: int, end: int) -> bool:
    """Return whether an instruction may leave the loop from ``start`` to ``end``."""
    if i.name in ("ret", "exit", "trap", "brkpt"):
        return True
    if i.name != "bra":
        return i.name in ("brx", "call")
    target = i.operands[0]
    return not isinstance(target, Symbol) or not start <= function.labels.get(target.name, -1) <= end


def is_polled(i: Instruction) -> bool:
    """Return whether an instruction reads memory that other threads may write concurrently."""
    if i.name == "atom":
        return True
    return i.name == "ld" and not _STRONG.isdisjoint(i.parts)


class Progress:
    """Detects whether the resident blocks make progress."""

    def __init__(self, machine: ResidentBlocks) -> None:
        self.m = machine
        self._state: tuple[int, ...] = ()
        self._rounds = 0
        self._signature_at_power = 0

    def is_quiet(self) -> bool:
        """Return whether only registers have changed since the last call."""
        m = self.m
        state = (m.memory.writes, m.shared.writes, m.changes)
        if state == self._state:
            return True
        self._state, self._rounds = state, 0
        return False

    def is_stalled(self, fragments: list[dict[int, ThreadSet]]) -> bool:
        """Return whether a quiet round repeats earlier registers, or there were too many quiet rounds."""
        self._rounds += 1
        if self._rounds > MAX_QUIET_ROUNDS:
            return True
        power = 1 << self._rounds.bit_length() - 1
        if self._rounds - power > 2:  # a longer circle is found by a later power of two
            return False
        signature = self._signature(fragments)
        if self._rounds == power:
            self._signature_at_power = signature
            return False
        return signature == self._signature_at_power

    def _signature(self, fragments: list[dict[int, ThreadSet]]) -> int:
        result = 0
        for waiting in fragments:
            for pc in sorted(waiting):
                result = zlib.crc32(lane_indices(waiting[pc]).tobytes(), result ^ pc)
        for name in sorted(self.m.registers):
            result = zlib.crc32(self.m.registers[name].tobytes(), result)
        return zlib.crc32(self.m.local.data.tobytes(), result)

"""Run the threads of some blocks: fragments, branches, barriers.

A quantum runs one warp of every block until all of its threads wait at a barrier or have ended; the order of the warps
is shuffled from a seed, so that a missing barrier shows in some order. Threads of a warp at different instructions run
lowest first and join where they meet, which is how structured code reconverges.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from greenfast.emulator import access, arithmetic, bits, convert, warp
from greenfast.emulator.faults import KernelFaultError
from greenfast.emulator.machine import WARP, Lanes, Machine, Operation, lane_count, lane_indices
from greenfast.emulator.operands import unsupported
from greenfast.emulator.printf import call
from greenfast.emulator.ptx import Function, Immediate, Instruction, Register, Symbol

BUILDERS: dict[str, Callable[[Instruction], Operation]] = {
    **arithmetic.BUILDERS,
    **bits.BUILDERS,
    **convert.BUILDERS,
    **access.BUILDERS,
    **warp.BUILDERS,
    "call": call,
}
#: Instructions that order memory accesses: every access here takes effect at once, so there is nothing to order.
_ORDERING = ("membar", "fence", "griddepcontrol", "prefetch", "prefetchu", "nanosleep", "pragma")
_CONTROL = ("bra", "ret", "exit", "bar", "barrier", "trap", "brkpt")
#: Instructions per warp after which a kernel counts as endless.
INSTRUCTION_LIMIT = 20_000_000
_NOT_WAITING = -1


class Program:
    """A function's instructions as operations."""

    def __init__(self, function: Function) -> None:
        """Raises UnsupportedError for the first instruction that the emulator does not know."""
        self.function = function
        self.operations = [self._build(i) for i in function.code]
        self.joins = set(function.labels.values())
        self.keys = [_key(i) for i in function.code]

    @staticmethod
    def _build(i: Instruction) -> Operation | None:
        if i.name in _CONTROL or i.name in _ORDERING:
            return None
        builder = BUILDERS.get(i.name)
        if builder is None:
            raise unsupported(i)
        return builder(i)


def _key(i: Instruction) -> str:
    """The name under which an instruction is counted."""
    if i.name in ("ld", "st", "wmma", "cp"):
        return ".".join((i.name, *(p for p in i.parts[:2] if not p.startswith("v") and not p[1:].isdigit())))
    return i.name


class Scheduler:
    """Runs a program on a machine's blocks."""

    def __init__(self, machine: Machine, program: Program, seed: int) -> None:
        self.m, self.program = machine, program
        self.code = program.function.code
        self.random = random.Random(seed)
        self.fragments: list[dict[int, Lanes]] = []
        for n in range(machine.warps):
            every = slice(n * machine.set_size, (n + 1) * machine.set_size)
            exists = machine.exists[every]
            lanes: Lanes = every if exists.all() else np.flatnonzero(exists) + every.start
            self.fragments.append({0: lanes})
        self.waiting = np.full(machine.lanes, _NOT_WAITING, np.int16)
        self.resume = np.zeros(machine.lanes, np.int32)
        self.expected = np.zeros(machine.lanes, np.int32)
        self.ended = ~machine.exists

    def run(self) -> None:
        """Run until all threads have ended. Raises KernelFaultError for what the kernel does wrong."""
        while True:
            ready = [n for n, fragments in enumerate(self.fragments) if fragments]
            if not ready:
                if self.ended.all():
                    return
                self._release()
                continue
            self.random.shuffle(ready)
            for n in ready:
                self._run_set(n)

    def _run_set(self, n: int) -> None:
        if self.m.phases is not None:
            self.m.counts = self.m.phases.of_warp(n)
        fragments = self.fragments[n]
        while fragments:
            pc = min(fragments)
            self._run_fragment(n, pc, fragments.pop(pc))

    def _put(self, n: int, pc: int, lanes: Lanes) -> None:
        """Add threads at an instruction, joining those that are there already."""
        fragments = self.fragments[n]
        if pc in fragments:
            lanes = np.union1d(lane_indices(fragments[pc]), lane_indices(lanes))
        if not isinstance(lanes, slice) and len(lanes) == self.m.set_size:
            lanes = slice(n * self.m.set_size, (n + 1) * self.m.set_size)
        fragments[pc] = lanes

    def _run_fragment(self, n: int, pc: int, lanes: Lanes) -> None:
        """Run threads from an instruction on, until they part, wait, end, or come to where others may join them."""
        m, program = self.m, self.program
        operations, code, keys, joins = program.operations, self.code, program.keys, program.joins
        others = bool(self.fragments[n])
        start = pc
        while True:
            if pc >= len(code):
                self.ended[lanes] = True
                return
            if others and pc in joins and pc != start:
                self._put(n, pc, lanes)
                return
            i = code[pc]
            m.current = i
            active = lanes
            if i.guard is not None:
                chosen = m.register(i.guard[0])[lanes] ^ i.guard[1]
                if i.name == "bra":
                    if chosen.all():
                        pc = self._target(i)
                    elif not chosen.any():
                        pc += 1
                    else:
                        indices = lane_indices(lanes)
                        self._count(i, keys[pc], lanes)
                        self._put(n, self._target(i), indices[chosen])
                        self._put(n, pc + 1, indices[~chosen])
                        return
                    self._count(i, "bra", lanes)
                    continue
                if not chosen.all():
                    active = lane_indices(lanes)[chosen]
            if lane_count(active):
                self._count(i, keys[pc], active)
                operation = operations[pc]
                if operation is not None:
                    operation(m, active)
                elif i.name in _CONTROL and "warp" not in i.parts:  # bar.warp orders accesses, no more
                    if i.name == "bra":
                        pc = self._target(i)
                        continue
                    self._control(i, pc, active)
                    if active is not lanes:
                        rest = np.setdiff1d(lane_indices(lanes), lane_indices(active))
                        self._put(n, pc + 1, rest)
                    return
            pc += 1

    def _count(self, i: Instruction, key: str, lanes: Lanes) -> None:
        count = lane_count(lanes)
        warps = count // WARP if isinstance(lanes, slice) else len(np.unique(lanes // WARP))
        self.m.counts.instructions[key] += warps
        self.m.counts.threads[key] += count
        if i.name == "ex2":
            self.m.counts.exponentials += count
        self.m.executed += 1
        if self.m.executed > INSTRUCTION_LIMIT:
            raise self.m.fault(
                f"no end after {INSTRUCTION_LIMIT} instructions (an endless loop?)", int(lane_indices(lanes)[0])
            )

    def _target(self, i: Instruction) -> int:
        label = i.operands[0]
        if not isinstance(label, Symbol) or label.name not in self.program.function.labels:
            raise unsupported(i)
        return self.program.function.labels[label.name]

    def _control(self, i: Instruction, pc: int, lanes: Lanes) -> None:
        if i.name in ("ret", "exit"):
            self.ended[lanes] = True
            return
        if i.name not in ("bar", "barrier"):
            raise self.m.fault(f"{i.name} was executed", int(lane_indices(lanes)[0]))
        if "sync" not in i.parts or i.parts[0] == "cta" or "red" in i.parts:
            raise unsupported(i)
        self.m.counts.barriers += lane_count(lanes) // WARP
        self.waiting[lanes] = self._number(i.operands[0], i, lanes) if i.operands else 0
        self.expected[lanes] = self._number(i.operands[1], i, lanes) if len(i.operands) > 1 else self.m.geometry.threads
        self.resume[lanes] = pc + 1

    def _number(self, operand: Any, i: Instruction, lanes: Lanes) -> Any:
        if isinstance(operand, Immediate):
            return operand.bits
        if isinstance(operand, Register):
            return self.m.register(operand.name)[lanes]
        raise unsupported(i)

    def _release(self) -> None:
        """Let the threads of complete barriers go on. Raises KernelFaultError where no barrier is complete."""
        m = self.m
        released = False
        for barrier in np.unique(self.waiting[self.waiting != _NOT_WAITING]):
            at = np.flatnonzero(self.waiting == barrier)
            arrived = np.bincount(m.block_of[at], minlength=len(m.blocks))
            wanted = np.zeros(len(m.blocks), np.int64)
            np.maximum.at(wanted, m.block_of[at], self.expected[at])
            complete = (arrived >= wanted) & (arrived > 0)
            go = at[complete[m.block_of[at]]]
            if len(go):
                released = True
                self._resume(go)
        if not released:
            raise self._stuck()

    def _resume(self, lanes: NDArray[np.intp]) -> None:
        self.waiting[lanes] = _NOT_WAITING
        for pc in np.unique(self.resume[lanes]):
            here = lanes[self.resume[lanes] == pc]
            for n in np.unique(here // self.m.set_size):
                self._put(int(n), int(pc), here[here // self.m.set_size == n])

    def _stuck(self) -> KernelFaultError:
        """The fault of a block whose threads wait for others that never come."""
        m = self.m
        block = int(m.block_of[np.flatnonzero(self.waiting != _NOT_WAITING)[0]])
        mine = m.block_of == block
        waits = []
        for n in range(m.warps):
            lanes = np.flatnonzero(mine & (np.arange(m.lanes) // m.set_size == n) & m.exists)
            for pc in np.unique(self.resume[lanes[self.waiting[lanes] != _NOT_WAITING]]):
                here = lanes[(self.waiting[lanes] != _NOT_WAITING) & (self.resume[lanes] == pc)]
                i = self.code[pc - 1]
                waits.append(f"{len(here)} threads of warp {n} wait at {i.source} ({i.text})")
            gone = int(self.ended[lanes].sum())
            if gone:
                waits.append(f"{gone} threads of warp {n} have ended")
        first = int(np.flatnonzero(mine & (self.waiting != _NOT_WAITING))[0])
        m.current = self.code[self.resume[first] - 1]
        return m.fault("deadlock, a barrier that not all threads reach: " + "; ".join(waits), first)

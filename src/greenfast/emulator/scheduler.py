"""The warp scheduler: runs the threads of the resident blocks, with divergence, barriers and convergence.

A quantum runs one warp index of every block until all of its threads wait or have ended. The order of the warps is
shuffled from a seed, so that a missing barrier shows in some order. Diverged threads of a warp run lowest instruction
first and join at the same instruction, so structured code reconverges. Warp-wide instructions (shuffles, matrix
fragments) wait for all threads of the warp, warpgroup instructions (wgmma) for its four warps. If the order of the
warps has no effect, all of them run together (lockstep.py).
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Container, Sequence

import numpy as np
from numpy.typing import NDArray

from greenfast.emulator.compiled.stretches import CompiledCode, Stretch
from greenfast.emulator.instructions import mbarrier, tma
from greenfast.emulator.instructions.barriers import NamedBarriers
from greenfast.emulator.instructions.convergence import SyncGroups
from greenfast.emulator.instructions.subroutines import jump
from greenfast.emulator.machine.blocks import WARP, ThreadSet, distinct, lane_indices, selection
from greenfast.emulator.machine.faults import KernelFaultError
from greenfast.emulator.machine.progress import (
    ENDLESS_WEIGHT,
    MAX_DIVERGED_INSTRUCTIONS,
    MAX_FAILED_POLLS,
    MAX_ITERATIONS,
    MAX_SILENT_INSTRUCTIONS,
    POLL_COST,
    Progress,
)
from greenfast.emulator.machine.stale_values import StaleReads
from greenfast.emulator.machine.state import ResidentBlocks
from greenfast.emulator.program import CONTROL, Program
from greenfast.emulator.ptx.recursion import JUMPS
from greenfast.emulator.ptx.syntax import Instruction, Special

#: Instructions per warp after which a kernel counts as endless.
INSTRUCTION_LIMIT = 20_000_000
#: Rounds without progress, with every wait timed out, after which the kernel is deadlocked.
MAX_NO_PROGRESS = 2
#: How often a warp that is held back runs while nothing else changes, before it is one like the others.
MAX_LAG_ROUNDS = 8
#: Probability of delivering a bulk copy while other work could run, in every second order of the warps. In the other
#: orders, copies arrive as late as possible. Late arrival exposes accesses without a wait.
EARLY_DELIVERY = 0.25
#: Added to a trap of a kernel that reads the workspace of grid barriers and has none.
_NOT_COOPERATIVE = " (by a grid barrier in a launch that is not cooperative?)"


class Scheduler:
    """Runs a program on a machine's blocks."""

    def __init__(self, machine: ResidentBlocks, program: Program, seed: int, order: int = 0) -> None:
        """Draw the order of the warps from a seed.

        order: 0 for the plain one. Others let other warps run after a warp's first atomic, volatile or acquire read, so
        that lost updates show, let such reads give old values, and hold a warp back.
        """
        self.m, self.program = machine, program
        self.code = program.function.code
        self.random = machine.random = random.Random(seed)
        # For each warp: threads by the instruction that they are at, the ones that can run and the ones that must stay.
        self.fragments: list[dict[int, ThreadSet]] = []
        self.blocked: list[dict[int, ThreadSet]] = [{} for _ in range(machine.warps)]
        for n in range(machine.warps):
            every = slice(n * machine.threads_per_warp_slot, (n + 1) * machine.threads_per_warp_slot)
            self.fragments.append({0: selection(np.flatnonzero(machine.exists[every]) + every.start)})
        self.barriers = NamedBarriers(machine, self.code)
        self.sync_groups = SyncGroups(machine, program.sync_groups)
        self.progress = Progress(machine)
        machine.memory.compares = machine.shared.compares = bool(program.polling)
        self.polled = set(program.polled) if order else set()
        if any(self.code[pc].name == "ld" for pc in self.polled):
            machine.races.stale = StaleReads(machine, machine.races.ordering, machine.races.warp_sync)
        machine.races.looks = program.looks
        machine.mbarriers.on_complete = machine.races.complete_phases
        #: A warp that runs only when nothing else can go on; -1 for none.
        self.held_back = self._choose_laggard(order) if order else -1
        self._early = EARLY_DELIVERY if order % 2 else 0.0
        self._lag_rounds = 0  # how often that warp has run since anything changed
        self.interrupted: set[tuple[int, int]] = set()  # warps and reads after which others have run
        self.interrupt = False
        self.failed_polls = [0] * machine.warps  # how many iterations a loop of each warp has waited in vain
        self.polls = [False] * machine.warps  # whether the last loop of each warp reads memory that others may write
        self.spent = 0  # cost of the iterations of waiting loops, in instructions
        self.spin_counts = Counter[int]()  # how often loops have let others run, by branch
        # Per warp: instructions executed since the last event, and the number of events then.
        self.silent_runs = [(0, -1)] * machine.warps
        self.ended = machine.ended
        #: Stretches that run as machine code; None if all instructions are interpreted.
        self.compiled: CompiledCode | None = None
        self.instruction_limit = INSTRUCTION_LIMIT
        #: The instruction before which the last run was suspended, -1 for none; its iterations of loops; and whether
        #: each of its warps must execute this instruction alone.
        self.suspended, self.iterations, self.apart = -1, 0, False

    def _choose_laggard(self, order: int) -> int:
        """Return a warp to hold back in this order of the warps, -1 for none.

        Laggards of earlier runs take turns, one per order. Without laggards, every second order holds back a random
        warp if the kernel waits for an mbarrier or polls in a loop.
        """
        if self.m.warps == 1 or not (self.program.polling or self.program.waits):
            return -1
        chosen = sorted(n for n in self.program.laggards if n < self.m.warps)
        if chosen:
            return [*chosen, -1][(order - 1) % (len(chosen) + 1)]
        return self.random.randrange(self.m.warps) if order % 2 else -1

    def run(self) -> None:
        """Run until all threads have ended. Raise KernelFaultError for a fault of the kernel."""
        seen, no_progress = -1, 0
        while True:
            for lanes in self.barriers.take_released():
                self._resume(lanes, self.barriers.pcs[lanes] + 1)
            if self.m.changes != seen:
                seen, no_progress = self.m.changes, 0
                self._retry()
            if any(self.fragments):
                self._round()
                if not self.progress.is_quiet() or not any(self.fragments):
                    self._lag_rounds = 0
                    if self.m.arriving and self.random.random() < self._early:
                        self._deliver()
                    continue
            if self.ended.all():
                tma.finish(self.m)
                return
            if groups := self.sync_groups.poll():
                for lanes in groups:
                    self._run_converged(lanes)
            elif self.m.arriving:
                self._deliver()
            elif self.held_back >= 0 and self.fragments[self.held_back]:
                self._run_one(self.held_back)
                self._lag_rounds += 1
                if self._lag_rounds > MAX_LAG_ROUNDS:
                    self.held_back = -1
            elif any(self.blocked) and no_progress < MAX_NO_PROGRESS:
                no_progress += 1
                self.m.timing_out[:] = True
                self._retry()
                self._round()
                self.m.timing_out[:] = False
            elif not any(self.fragments) or self.progress.is_stalled(self.fragments):
                raise self._deadlock()

    def _round(self) -> None:
        """Run every warp that can run, in some order."""
        ready = [n for n, fragments in enumerate(self.fragments) if fragments and n != self.held_back]
        self.random.shuffle(ready)
        for n in ready:
            self._run_one(n)

    def _run_one(self, n: int) -> None:
        """Run a warp, and count and limit its instructions."""
        self._count_for(n)
        before = self.m.executed + self.spent
        self._run_warp(n)
        self._limit(n, self.m.executed + self.spent - before)

    def _run_warp(self, n: int) -> None:
        """Run a warp until its threads wait, have ended, or poll in a loop.

        After some failed polls the other threads of the warp run first: the loop may wait for them.
        """
        fragments, spinning = self.fragments[n], set[int]()
        writes = self.m.memory.writes + self.m.shared.writes
        begin = self.m.executed
        while len(fragments) > len(spinning):
            if self.m.executed - begin > MAX_DIVERGED_INSTRUCTIONS:
                return
            pc = min(fragments.keys() - spinning) if spinning else min(fragments)
            self.m.races.warp = n
            lanes = fragments.pop(pc)
            again = self._run_fragment([(n, lanes)], pc, lanes, pc, bool(fragments))
            if self.interrupt:
                self.interrupt = False
                return
            if again is None:
                spinning &= fragments.keys()
                continue
            spinning.add(again)
            self.spent += POLL_COST
            if self.m.memory.writes + self.m.shared.writes != writes:
                self.failed_polls[n] = 0
                return
            if self.failed_polls[n] < MAX_FAILED_POLLS:
                self.failed_polls[n] += 1
                return
        if not spinning:
            self.failed_polls[n] = 0

    def _limit(self, n: int, executed: int) -> None:
        """Report a warp that has executed too many instructions without an effect visible to others."""
        total, events = self.silent_runs[n]
        self.silent_runs[n] = (total + executed if events == self.m.changes else executed, self.m.changes)
        if self.silent_runs[n][0] > MAX_SILENT_INSTRUCTIONS and self.fragments[n]:
            lane = int(lane_indices(next(iter(self.fragments[n].values())))[0])
            reason = f"no end of a loop after {self.silent_runs[n][0]} instructions of warp {n}"
            if self.program.clocked:  # it may wait for a time; clocks advance slowly here
                raise self.m.limit(f"{reason}, in a kernel that reads a clock: it may wait for a time", lane)
            if not self.polls[n]:
                raise self.m.limit(f"{reason}, which waits for no other thread: it may only be long", lane)
            raise self.m.fault(f"{reason} (an endless loop?)", lane)

    def _count_for(self, n: int) -> None:
        """Direct the counts to the current phase of a warp, if phases are counted."""
        if self.m.phases is not None:
            self.m.counts = self.m.phases.select_warp(n)

    def _retry(self) -> None:
        """Let the threads that have to stay at an instruction try it again."""
        for n, blocked in enumerate(self.blocked):
            for pc, lanes in blocked.items():
                self._put(n, pc, lanes)
            blocked.clear()

    def _deliver(self) -> None:
        """Deliver one of the bulk copies in flight; if they arrive late, one that a thread waits for comes first.

        A read of data without a wait for their own mbarrier then comes too early.
        """
        candidates = list(range(len(self.m.arriving)))
        if not self._early:
            rows = {
                row
                for fragments in self.blocked
                for lanes in fragments.values()
                for row in self.m.waiting_mbarrier[lanes].tolist()
            }
            awaited = [n for n in candidates if not rows.isdisjoint(self.m.arriving[n].mbarriers.tolist())]
            candidates = awaited or candidates
        load = self.m.arriving.pop(self.random.choice(candidates))
        self.m.current = load.instruction
        load.land()

    def _put(self, n: int, pc: int, lanes: ThreadSet) -> None:
        """Add threads at an instruction to the threads already there."""
        self._add(self.fragments[n], pc, lanes)

    def _add(self, to: dict[int, ThreadSet], pc: int, lanes: ThreadSet) -> None:
        if pc in to:
            lanes = np.union1d(lane_indices(to[pc]), lane_indices(lanes))
        to[pc] = lanes if isinstance(lanes, slice) else selection(lanes)

    def _resume(self, lanes: NDArray[np.intp], index: NDArray[np.int64]) -> None:
        """Put threads of any warps, in their order, at the instructions ``index``."""
        size = self.m.threads_per_warp_slot
        for pc in distinct(index):
            here = lanes[index == pc]
            bounds = np.searchsorted(here, np.arange(0, self.m.lanes + size, size)).tolist()
            for n in range(self.m.warps):
                if bounds[n] < bounds[n + 1]:
                    self._put(n, pc, here[bounds[n] : bounds[n + 1]])

    def _run_fragment(
        self,
        slots: Sequence[tuple[int, ThreadSet]],
        pc: int,
        lanes: ThreadSet,
        start: int,
        others: bool,
        stops: Container[int] = (),
        iterations: int = 0,
    ) -> int | None:
        """Run threads from an instruction on until they diverge, wait, end, or reach a possible join.

        slots: the warps that run together, each with its threads; several only in lockstep (lockstep.py). start: the
        instruction at which their run began. others: whether other threads of each warp wait at other instructions.
        stops: instructions before which the run is suspended. iterations: of loops, since ``start``.

        Return their instruction if they poll in a loop and yield.
        """
        m, program = self.m, self.program
        operations, code, keys, joins = program.operations, self.code, program.keys, program.joins
        targets, polling, sync_groups = program.targets, program.polling, program.sync_groups
        every_lane, together, n = _size(lanes), len(slots) > 1, slots[0][0]
        begin = True
        self.suspended, self.apart = -1, False
        stretches = self.compiled.stretches if self.compiled is not None else {}
        while True:
            if pc >= len(code):
                self._end(lanes)
                return None
            if others and pc in joins and pc != start:
                for slot, own in slots:
                    self._put(slot, pc, own)
                return None
            if pc in stops and not begin:
                self.suspended, self.iterations = pc, iterations
                return None
            begin = False
            if pc in stretches and self.compiled is not None and self._may_run(stretches[pc], stops):
                following = self.compiled.run(pc, lanes, every_lane)
                if following != pc:
                    pc = following
                    continue
            i = code[pc]
            m.current = i
            active, size = lanes, every_lane
            if i.guard is not None:
                chosen = m.register(i.guard[0])[lanes] ^ i.guard[1]
                some = np.count_nonzero(chosen)  # takes a third of the time of chosen.any()
                every = some == len(chosen)
                if together and some and not every and (i.name in CONTROL or pc in sync_groups):
                    self.suspended, self.iterations, self.apart = pc, iterations, True
                    return None
                if i.name == "bra":
                    self._count(i, "bra", lanes, size)
                    if not some:
                        pc += 1
                        continue
                    target = targets[pc]
                    iterations += target <= pc
                    spinning = target <= pc and self._spins(pc, iterations, others)
                    if every and not spinning:
                        pc = target
                        continue
                    if spinning:
                        self.polls[n] = pc in polling
                    indices = lane_indices(lanes)
                    self._put(n, target, indices[chosen])
                    if not every:
                        self._put(n, pc + 1, indices[~chosen])
                    return target if spinning else None
                if not some:
                    pc += 1
                    continue
                if not every:
                    active = selection(lane_indices(lanes)[chosen])
                    size = _size(active)
            meets = pc in sync_groups
            if meets and not self.sync_groups.complete(pc, active):
                if together:
                    self.suspended, self.iterations, self.apart = pc, iterations, True
                    return None
                groups = self.sync_groups.arrive(pc, active)
                self._split(n, pc + 1, lanes, active)
                for group in groups:
                    self._run_converged(group)
                return None
            operation = operations[pc]
            if meets and operation is None:
                m.races.sync_warp(lane_indices(active))
            if operation is not None:
                m.races.warp_sync.collective = meets
                stay = operation(m, active)
                if meets and sync_groups[pc].aligned:
                    m.races.warp_sync.converged[active] = m.races.ordering.now
                m.races.warp_sync.collective = False
                if stay is not None and len(stay):
                    passed = np.setdiff1d(lane_indices(active), stay, assume_unique=True)
                    if len(passed):
                        self._count(i, keys[pc], passed, _size(passed))
                    self._add(self.blocked[n], pc, stay)
                    self._split(n, pc + 1, lanes, stay)
                    return None
                self._count(i, keys[pc], active, size)
                if pc in self.polled and (n, pc) not in self.interrupted:
                    self.interrupted.add((n, pc))
                    self.interrupt = True
                    m.events += 1
                    self._put(n, pc + 1, lanes)
                    return None
            else:
                self._count(i, keys[pc], active, size)
                if i.name in CONTROL and not meets:
                    if i.name == "bra":
                        target = targets[pc]
                        iterations += target <= pc
                        if target <= pc and self._spins(pc, iterations, others):
                            self.spin_counts[pc] += 1
                            self.polls[n] = pc in polling
                            if (
                                max(iterations, self.spin_counts[pc] * ENDLESS_WEIGHT) > MAX_ITERATIONS
                                and pc in program.endless
                            ):
                                raise m.fault("an endless loop: nothing leads out of it", int(lane_indices(lanes)[0]))
                            self._put(n, target, lanes)
                            return target
                        pc = target
                        continue
                    if self._control(i, pc, active):
                        self._split(n, pc + 1, lanes, active)
                        return None
            pc += 1

    def _may_run(self, stretch: Stretch, stops: Container[int]) -> bool:
        """Return whether all of a stretch may run: it holds no stop, and ends below the limit of instructions."""
        if self.m.executed + stretch.length > self.instruction_limit:
            return False
        return not stops or not any(pc in stops for pc in range(stretch.start + 1, stretch.end))

    def _spins(self, pc: int, iterations: int, others: bool) -> bool:
        """Return whether a loop lets other warps run at its branch, after so many iterations."""
        return pc in self.program.polling or iterations > MAX_ITERATIONS

    def _split(self, n: int, pc: int, lanes: ThreadSet, without: ThreadSet) -> None:
        """Let the ``lanes`` that are not in ``without`` go on."""
        if without is not lanes:
            remainder = np.setdiff1d(lane_indices(lanes), lane_indices(without), assume_unique=True)
            if len(remainder):
                self._put(n, pc, remainder)

    def _count(self, i: Instruction, key: str, lanes: ThreadSet, size: tuple[int, int]) -> None:
        """Count an instruction of threads that are ``size`` warps and threads."""
        m, counts = self.m, self.m.counts
        warps, threads = size
        counts.instructions[key] += warps
        counts.threads[key] += threads
        if i.name == "ex2":
            counts.exponentials += threads
        m.executed += 1
        if m.executed > self.instruction_limit:
            reason = f"no end after {INSTRUCTION_LIMIT} instructions: too long to emulate"
            raise m.limit(reason, int(lane_indices(lanes)[0]))

    def _end(self, lanes: ThreadSet) -> None:
        """End threads: barriers and groups of their warp no longer wait for them."""
        self.ended[lanes] = True
        self.m.races.warp_sync.end(lanes)
        self.m.events += 1
        self.barriers.release_ended()

    def _control(self, i: Instruction, pc: int, lanes: ThreadSet) -> bool:
        """Execute the end of threads or a barrier. Return whether the threads stop here."""
        if i.name in ("ret", "exit"):
            self._end(lanes)
            return True
        if i.name in JUMPS:
            indices = lane_indices(lanes)
            self._resume(indices, jump(self.m, i, indices, pc))
            return True
        if i.name not in ("bar", "barrier"):
            wanted = any(
                isinstance(o, Special) and o.name in ("%envreg1", "%envreg2") for j in self.code for o in j.operands
            )
            hint = _NOT_COOPERATIVE if wanted and not self.m.workspace else ""
            raise self.m.fault(f"{i.name} was executed{hint}", int(lane_indices(lanes)[0]))
        return self.barriers.arrive(i, pc, lanes)

    def _run_converged(self, lanes: NDArray[np.intp]) -> None:
        """Run a collective instruction for converged threads, each from its own instruction."""
        pcs = self.sync_groups.pcs[lanes]
        if self.program.operations[int(pcs[0])] is None:
            self.m.races.sync_warp(lanes)
        for pc in np.unique(pcs).tolist():  # several only for instructions without an operation
            self._run_converged_at(pc, lanes[pcs == pc])

    def _run_converged_at(self, pc: int, lanes: NDArray[np.intp]) -> None:
        i, operation = self.code[pc], self.program.operations[pc]
        self.m.current = i
        width = self.program.sync_groups[pc].warps * self.m.threads_per_warp_slot
        for group in np.unique(lanes // width):
            mine = lanes[lanes // width == group]
            self.m.races.warp = int(mine[0]) // self.m.threads_per_warp_slot
            whole = selection(mine)
            self.m.races.warp_sync.collective = True
            stay = operation(self.m, whole) if operation is not None else None
            if self.program.sync_groups[pc].aligned:
                self.m.races.warp_sync.converged[whole] = self.m.races.ordering.now
            self.m.races.warp_sync.collective = False
            if stay is not None and len(stay):
                for n in np.unique(stay // self.m.threads_per_warp_slot):
                    self._add(self.blocked[n], pc, stay[stay // self.m.threads_per_warp_slot == n])
                mine = np.setdiff1d(mine, stay, assume_unique=True)
            if len(mine):
                self._count(i, self.program.keys[pc], mine, _size(mine))
                self._resume(mine, np.full(len(mine), pc + 1))

    # ---- deadlock ---------------------------------------------------------------------------------------------------

    def _deadlock(self) -> KernelFaultError:
        """Return the fault of a block with threads that wait, or spin, forever."""
        m = self.m
        waiting = np.flatnonzero(~self.ended)
        block = int(m.block_of[waiting[0]])
        mine = m.block_of == block
        waits, first = [], -1
        for n in range(m.warps):
            lanes = np.flatnonzero(mine & (np.arange(m.lanes) // m.threads_per_warp_slot == n) & m.exists)
            result = {pc: f"{count} threads" for pc, count in self.barriers.waits(lanes).items()}
            notes = dict.fromkeys(result, "")
            for pc, (count, others) in self.sync_groups.waits(lanes).items():
                result[pc], notes[pc] = f"{count} threads", others
            for pc, blocked in self.blocked[n].items():
                here = np.intersect1d(lane_indices(blocked), lanes)
                if len(here):
                    result[pc] = f"{len(here)} threads"
                    notes[pc] = self._describe_wait(pc, here)
            for pc, spinning in self.fragments[n].items():
                here = np.intersect1d(lane_indices(spinning), lanes)
                if len(here):
                    result[pc], notes[pc] = f"{len(here)} threads", " in a loop that nothing ends"
            for pc in sorted(result):
                i = self.code[pc]
                waits.append(f"{result[pc]} of warp {n} wait at {i.place} ({i.short_text}){notes[pc]}")
                if first < 0:
                    first, m.current = int(lanes[~self.ended[lanes]][0]), i
            gone = int(self.ended[lanes].sum())
            if gone:
                waits.append(f"{gone} threads of warp {n} have ended")
        barrier = self.barriers.arrived.any() and not any(self.blocked) and not any(self.fragments)
        why = "deadlock, a barrier that not all threads reach" if barrier else "deadlock, nothing can go on"
        begun = len(m.blocks) + int(m.blocks[0])
        if any(self.fragments) and begun < m.geometry.blocks:
            waits.append(f"{m.geometry.blocks - begun} blocks have not begun, {len(m.blocks)} are resident at once")
        return m.fault(f"{why}: " + "; ".join(waits), max(first, 0))

    def _describe_wait(self, pc: int, lanes: NDArray[np.intp]) -> str:
        """Describe the event that threads blocked at an instruction wait for."""
        if self.code[pc].name != "mbarrier":
            return ""
        return f" for {mbarrier.describe(self.m, int(self.m.waiting_mbarrier[lanes[0]]))}"


def _size(lanes: ThreadSet) -> tuple[int, int]:
    """Return how many warps and threads a selection holds; not empty."""
    if isinstance(lanes, slice):
        threads = lanes.stop - lanes.start
        return threads // WARP, threads
    warps = lanes // WARP
    return 1 + int(np.count_nonzero(warps[1:] != warps[:-1])), len(lanes)

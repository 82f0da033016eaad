"""Named barriers of a block: bar and barrier.cta with sync, arrive and red (PTX ISA, "bar")."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from greenfast.emulator.instructions.operands import reader, writer
from greenfast.emulator.machine.blocks import WARP, ThreadSet, distinct, lane_count, lane_indices
from greenfast.emulator.machine.state import ResidentBlocks
from greenfast.emulator.ptx.syntax import Instruction, Register, Symbol

#: Barriers of a block.
BARRIERS = 16
_NOT_WAITING = -1


class NamedBarriers:
    """The named barriers of all blocks: the threads that have arrived and the threads that wait.

    A warp arrives when all of its living threads have arrived. It counts as 32 threads, even if some of them have ended
    or never existed (PTX ISA, "bar"). A barrier without a count requires every living thread.
    """

    def __init__(self, machine: ResidentBlocks, code: list[Instruction]) -> None:
        self.m, self.code = machine, code
        size = len(machine.blocks) * BARRIERS
        self.arrived = np.zeros(size, np.int64)
        self.expected = np.zeros(size, np.int64)
        self.all_threads = np.zeros(size, np.bool_)  # came with no count
        self.present = np.zeros((BARRIERS, machine.lanes), np.bool_)
        self.waiting = np.full(machine.lanes, _NOT_WAITING, np.int64)  # block * BARRIERS + barrier
        self.pcs = np.zeros(machine.lanes, np.int64)  # the instruction that a thread waits at
        self.votes = np.zeros(machine.lanes, np.bool_)
        self.released: list[NDArray[np.intp]] = []

    def arrive(self, i: Instruction, pc: int, lanes: ThreadSet) -> bool:
        """Arrive at a barrier instruction. Return whether the threads wait there."""
        m = self.m
        form = _BarrierForm(i)
        indices = lane_indices(lanes)
        m.counts.barriers += lane_count(lanes) // WARP
        number = np.broadcast_to(form.number(m, lanes), len(indices)).astype(np.int64)
        count = np.broadcast_to(form.count(m, lanes), len(indices)).astype(np.int64)
        wrong = (number < 0) | (number >= BARRIERS)
        if wrong.any():
            index = int(np.flatnonzero(wrong)[0])
            raise m.fault(f"barrier {number[index]}, of {BARRIERS}", int(indices[index]))
        keys = m.block_of[indices] * BARRIERS + number
        if isinstance(lanes, slice) and int(number.min()) == int(number.max()):  # whole warps
            which, first, new = np.unique(keys[::WARP], return_index=True, return_counts=True)
            first, new = first * WARP, new * WARP
        else:
            which, first, new = np.unique(keys, return_index=True, return_counts=True)
        fresh = self.arrived[which] == 0
        self.expected[which[fresh]] = count[first[fresh]]
        self.all_threads[which[fresh]] = form.all_threads
        differ = self.expected[keys] != count
        if differ.any():
            index = int(np.flatnonzero(differ)[0])
            expected = self.expected[keys[index]]
            reason = f"barrier {number[index]} with {count[index]} threads, where others came with {expected}"
            raise m.fault(reason, int(indices[index]))
        self.arrived[which] += new
        if int(number.min()) == int(number.max()):
            self.present[int(number[0]), indices] = True
        else:
            self.present[number, indices] = True
        over = self.arrived[which] > self.expected[which]
        if over.any():
            index = int(first[over][0])
            key = keys[index]
            reason = f"{self.arrived[key]} threads at barrier {number[index]}; it expects {self.expected[key]}"
            raise m.fault(reason, int(indices[index]))
        if form.waits:
            self.waiting[indices] = keys
            self.pcs[indices] = pc
            if form.vote is not None:
                self.votes[indices] = form.vote(m, lanes)
        else:
            m.races.ordering.arrive(which.tolist(), (which // BARRIERS).tolist(), m.races.warp)
        self._release(which[self._complete(which)])
        m.events += 1
        return form.waits

    def release_ended(self) -> None:
        """Release barriers that wait for no other thread after threads have ended."""
        begun = np.flatnonzero(self.arrived)
        if len(begun):
            self._release(begun[self._complete(begun)])

    def _complete(self, keys: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return a mask of the barriers that have all arrivals."""
        m = self.m
        full: NDArray[np.bool_] = self.arrived[keys] == self.expected[keys]
        if full.all() or not m.ended.any():
            return full
        ended = m.ended.reshape(m.warps, len(m.blocks), WARP)
        for index in np.flatnonzero(~full):
            block, number = divmod(int(keys[index]), BARRIERS)
            gone = ended[:, block]
            came = self.present[number].reshape(ended.shape)[:, block]
            if self.all_threads[keys[index]]:
                full[index] = bool((came | gone).all())
            else:
                there = came.any(axis=1) & (came | gone).all(axis=1)
                full[index] = there.sum() * WARP == self.expected[keys[index]]
        return full

    def _release(self, complete: NDArray[np.int64]) -> None:
        if not len(complete):
            return
        self.arrived[complete] = 0
        self.m.mbarriers.show(complete // BARRIERS, len(self.m.blocks))
        came = self.present.reshape(BARRIERS, self.m.warps, -1, WARP)
        came[complete % BARRIERS, :, complete // BARRIERS] = False
        done = np.zeros(len(self.arrived) + 1, np.bool_)  # the last: for threads that do not wait
        done[complete] = True
        go = np.flatnonzero(done[self.waiting])
        self.m.races.complete_barriers(complete, go, self.waiting[go], BARRIERS)
        self._require_aligned(go)
        self._reduce(go)
        self.waiting[go] = _NOT_WAITING
        self.released.append(go)

    def _require_aligned(self, lanes: NDArray[np.intp]) -> None:
        """Report threads of a warp that waited at different instructions, unless every instruction may diverge."""
        index = self.pcs[lanes]
        if not len(index) or (index == index[0]).all():
            return
        warps = lanes // WARP
        split = np.flatnonzero((np.diff(warps) == 0) & (np.diff(index) != 0))
        for n in split.tolist():
            i = self.code[int(index[n])]
            if i.name == "bar" or "aligned" in i.parts:
                self.m.current = i
                other = self.code[int(index[n + 1])].source
                raise self.m.fault(
                    f"a barrier of whole warps while others of this warp wait at {other},", int(lanes[n])
                )

    def _reduce(self, lanes: NDArray[np.intp]) -> None:
        """Give the threads of bar.red the result of their barrier's vote."""
        for pc in distinct(self.pcs[lanes]):
            i = self.code[pc]
            if "red" not in i.parts:
                continue
            here = lanes[self.pcs[lanes] == pc]
            _, group = np.unique(self.waiting[here], return_inverse=True)
            yes = np.bincount(group, weights=self.votes[here])[group]
            if "popc" in i.parts:
                writer(i.operands[0], "u32", i)(self.m, here, yes.astype(np.uint32))
            else:
                value = yes > 0 if "or" in i.parts else yes == np.bincount(group)[group]
                writer(i.operands[0], "pred", i)(self.m, here, value)

    def take_released(self) -> list[NDArray[np.intp]]:
        """Return the threads released since the last call; they resume after their barrier instruction."""
        result, self.released = self.released, []
        return result

    def waits(self, lanes: NDArray[np.intp]) -> dict[int, int]:
        """Return the number of waiting threads by instruction."""
        index, count = np.unique(self.pcs[lanes[self.waiting[lanes] != _NOT_WAITING]], return_counts=True)
        return dict(zip(index.tolist(), count.tolist(), strict=True))


class _BarrierForm:
    """The operands of a barrier instruction."""

    def __init__(self, i: Instruction) -> None:
        operands = list(i.operands)
        self.waits = "arrive" not in i.parts
        self.vote: Callable[[ResidentBlocks, ThreadSet], Any] | None = None
        if "red" in i.parts:
            operands = operands[1:]
            last = operands.pop()
            negated = isinstance(last, Symbol) and last.name.startswith("!")
            predicate = reader(Register(last.name[1:]) if isinstance(last, Symbol) and negated else last, "pred", i)
            self.vote = lambda m, lanes: np.asarray(predicate(m, lanes)) ^ negated
        self.number: Callable[[ResidentBlocks, ThreadSet], Any] = (
            reader(operands[0], "u32", i) if operands else lambda m, lanes: np.uint32(0)
        )
        self.all_threads = len(operands) < 2
        self.count: Callable[[ResidentBlocks, ThreadSet], Any] = (
            reader(operands[1], "u32", i) if len(operands) > 1 else lambda m, lanes: np.uint32(m.geometry.threads)
        )

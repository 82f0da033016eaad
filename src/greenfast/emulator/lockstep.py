"""Run the warps of a block in lockstep, as one vector, with the results of running them one after the other.

Without data races the order of the warps does not matter, unless they communicate by atomic or volatile accesses,
mbarriers and the like: other programs run in lockstep. It stops at the first access that may be a race (epochs.py) and
at the first fault. The grid then runs again warp by warp, and that run decides.

Warps at one instruction execute it together. Each warp diverges and joins as if it ran alone, so that counts are equal:
warps with divergent threads execute the branch one by one, and join the others at the place where these wait.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from greenfast.emulator.machine.blocks import ThreadSet, lane_indices, selection
from greenfast.emulator.machine.epochs import RestartWarpByWarp
from greenfast.emulator.machine.progress import MAX_ITERATIONS, MAX_SILENT_INSTRUCTIONS
from greenfast.emulator.scheduler import INSTRUCTION_LIMIT, Scheduler


@dataclass(frozen=True)
class _Run:
    """A warp's running threads: their place, the place where they began, and whether others of the warp wait."""

    pc: int
    lanes: ThreadSet
    start: int
    others: bool
    iterations: int = 0

    @property
    def key(self) -> tuple[int, int]:
        """Warps with equal keys run together; the start matters only if others wait."""
        return self.pc, self.start if self.others else -1


class LockstepScheduler(Scheduler):
    """Runs the warps in lockstep. Raises RestartWarpByWarp if something may be a fault."""

    def _round(self) -> None:
        """Run all warps until their threads wait or have ended."""
        runs: dict[int, _Run] = {}
        self.instruction_limit = min(INSTRUCTION_LIMIT // self.m.warps, self.m.executed + MAX_SILENT_INSTRUCTIONS)
        while True:
            for n, fragments in enumerate(self.fragments):
                if fragments and n not in runs:
                    pc = min(fragments)
                    lanes = fragments.pop(pc)
                    runs[n] = _Run(pc, lanes, pc, bool(fragments))
            if not runs:
                return
            key = min(run.key for run in runs.values())
            group = sorted(n for n, run in runs.items() if run.key == key)  # threads of a ThreadSet ascend
            stops = frozenset(run.pc for run in runs.values() if run.key != key)
            self._run_together({n: runs[n] for n in group}, runs, stops)

    def _run_together(self, group: dict[int, _Run], runs: dict[int, _Run], stops: frozenset[int]) -> None:
        """Run warps with equal keys until one of ``stops``; all but one alone at instructions that separate them."""
        self._advance(group, runs, stops)
        if self.apart:
            for n in group:
                self._advance({n: runs[n]}, runs, range(len(self.code) + 1))

    def _advance(self, group: dict[int, _Run], runs: dict[int, _Run], stops: frozenset[int] | range) -> None:
        """Run some warps and update their ``runs``."""
        first = next(iter(group.values()))
        slots = [(n, run.lanes) for n, run in group.items()]
        iterations = max(run.iterations for run in group.values())
        lanes = _union([run.lanes for run in group.values()])
        if self._run_fragment(slots, first.pc, lanes, first.start, first.others, stops, iterations) is not None:
            raise RestartWarpByWarp
        for n, run in group.items():
            if self.suspended < 0:
                del runs[n]
            else:
                runs[n] = replace(run, pc=self.suspended, iterations=self.iterations)

    def _spins(self, pc: int, iterations: int, others: bool) -> bool:
        """Return whether a loop may be endless, or lets other threads of its warp run."""
        return iterations > MAX_ITERATIONS and (others or pc in self.program.endless)


def _union(parts: list[ThreadSet]) -> ThreadSet:
    """Return the threads of several warps, in their order."""
    if len(parts) == 1:
        return parts[0]
    return selection(np.concatenate([lane_indices(part) for part in parts]))

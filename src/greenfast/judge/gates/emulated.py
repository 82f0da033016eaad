"""Small cases on the emulator while a GPU runs all of them: it sees what a GPU does not show.

Such as an access that happens to hit other memory, a race that happens to go well, and shared memory that still holds
what an earlier block left there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from greenfast.device.session import RunResult
from greenfast.device.worker import UnsupportedByDeviceError, Worker, WorkerError
from greenfast.judge.check_plan import CasePlan
from greenfast.judge.gates.sides import BuiltSide
from greenfast.spec.problem import Case

_REPEATS = 2
#: Blocks of a launch that run where all of them take too long.
_SAMPLE = 4


class EmulatedRuns:
    """Runs cases of each side in an emulator's process. Use as a context manager, which ends the processes.

    cells: the cases; a side does not run those whose shape it does not compute, nor any after one that failed. If
    a case takes too long, a few blocks run by themselves: a fault of theirs counts.
    """

    def __init__(
        self, sides: Sequence[BuiltSide], cells: Sequence[CasePlan], make_worker: Callable[[], Worker]
    ) -> None:
        self.cells = tuple(cells)
        self._make_worker = make_worker
        self._sides = [side for side in sides if any(cell.shape.name in side.programs for cell in cells)]
        self._workers = {side.role: make_worker() for side in self._sides}
        self._threads = {side.role: ThreadPoolExecutor(1) for side in self._sides}
        self._failed: set[str] = set()
        self._started: dict[tuple[str, int], Future[RunResult | WorkerError | None]] = {}

    def __enter__(self) -> EmulatedRuns:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._workers.values():
            worker.close()
        for thread in self._threads.values():
            thread.shutdown(wait=True, cancel_futures=True)

    def start(self, cell: CasePlan, case: Case) -> None:
        """Begin one of the cells in the background, after those that were begun before."""
        for side in self._sides:
            if cell.shape.name in side.programs:
                key = side.role, self.cells.index(cell)
                self._started[key] = self._threads[side.role].submit(self._run, side, cell, case)

    def results(self) -> Mapping[tuple[str, int], RunResult | WorkerError]:
        """By role and number of the cell, what was found; waits for it."""
        found = {key: run.result() for key, run in self._started.items()}
        return {key: result for key, result in found.items() if result is not None}

    def _run(self, side: BuiltSide, cell: CasePlan, case: Case) -> RunResult | WorkerError | None:
        if side.role in self._failed:
            return None
        try:
            return self._workers[side.role].run(side.executable(cell.shape.name), case, _REPEATS)
        except UnsupportedByDeviceError as e:
            if not e.ended:
                return e
            self._failed.add(side.role)
            return self._sample(side, cell, case, e)
        except WorkerError as e:
            if e.ended:
                self._failed.add(side.role)
            return e

    def _sample(self, side: BuiltSide, cell: CasePlan, case: Case, late: UnsupportedByDeviceError) -> WorkerError:
        """A fault of some of the blocks; else the error for all of them, with what was run."""
        executable = side.executable(cell.shape.name)
        self._workers[side.role].close()
        self._workers[side.role] = worker = self._make_worker()
        try:
            count = worker.sample(executable, case, _SAMPLE)
        except UnsupportedByDeviceError as e:
            return UnsupportedByDeviceError(f"{late}; nor was a part of it run: {e}", ended=True)
        except WorkerError as e:
            return e
        blocks = math.prod(executable.steps[0][1].grid)
        return UnsupportedByDeviceError(
            f"{late}; {count} of {blocks} blocks ran by themselves, without a fault", ended=True
        )

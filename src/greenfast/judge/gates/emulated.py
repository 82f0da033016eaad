"""One small case on the emulator while a GPU runs all of them: it sees what a GPU does not show.

Such as an access that happens to hit other memory, a race that happens to go well, and shared memory that still holds
what an earlier block left there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from greenfast.device.session import RunResult
from greenfast.device.worker import Worker, WorkerError
from greenfast.judge.exam import Cell
from greenfast.judge.gates.sides import BuiltSide
from greenfast.spec.problem import Case

_REPEATS = 2


class EmulatedRuns:
    """Runs a case of each side in an emulator's process. Use as a context manager, which ends the processes.

    cell: the case; a side that does not compute its shape is left out.
    """

    def __init__(self, sides: Sequence[BuiltSide], cell: Cell, make_worker: Callable[[], Worker]) -> None:
        self.cell = cell
        self._sides = [side for side in sides if cell.shape.name in side.programs]
        self._workers = {side.role: make_worker() for side in self._sides}
        self._threads = ThreadPoolExecutor(max(1, len(self._sides)))
        self._started: dict[str, Future[RunResult]] = {}

    def __enter__(self) -> EmulatedRuns:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._workers.values():
            worker.close()
        self._threads.shutdown(wait=True, cancel_futures=True)

    def start(self, case: Case) -> None:
        """Begin, in the background."""
        for side in self._sides:
            executable = side.executable(self.cell.shape.name)
            run = self._workers[side.role].run
            self._started[side.role] = self._threads.submit(run, executable, case, _REPEATS)

    def results(self) -> Mapping[str, RunResult | WorkerError]:
        """By role, what was found; waits for it."""
        found: dict[str, RunResult | WorkerError] = {}
        for role, run in self._started.items():
            try:
                found[role] = run.result()
            except WorkerError as e:
                found[role] = e
        return found

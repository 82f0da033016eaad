"""Small cases on the emulator while a GPU runs all cases.

The emulator detects faults that a GPU does not show: an access that hits other valid memory, a race without effect, and
a read of shared memory that holds data of an earlier block.
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
#: Number of blocks that run alone if the whole launch takes too long.
_SAMPLE = 4


class EmulatedRuns:
    """Runs of cases on the emulator, one process per implementation. Use as a context manager, which ends them.

    An implementation skips the shapes that it does not support, and all cases after one that ended its process. If a
    case takes too long, a few of its blocks run alone, and their faults count.
    """

    def __init__(
        self, sides: Sequence[BuiltSide], case_plans: Sequence[CasePlan], make_worker: Callable[[], Worker]
    ) -> None:
        self.case_plans = tuple(case_plans)
        self._make_worker = make_worker
        self._sides = [side for side in sides if any(case_plan.shape.name in side.programs for case_plan in case_plans)]
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

    def start(self, case_plan: CasePlan, case: Case) -> None:
        """Queue a case. Cases of one implementation run in the background, one after the other."""
        for side in self._sides:
            if case_plan.shape.name in side.programs:
                key = side.role, self.case_plans.index(case_plan)
                self._started[key] = self._threads[side.role].submit(self._run, side, case_plan, case)

    def results(self) -> Mapping[tuple[str, int], RunResult | WorkerError]:
        """Wait for all cases. Return the results by role and index of the case plan."""
        results = {key: run.result() for key, run in self._started.items()}
        return {key: result for key, result in results.items() if result is not None}

    def _run(self, side: BuiltSide, case_plan: CasePlan, case: Case) -> RunResult | WorkerError | None:
        if side.role in self._failed:
            return None
        try:
            return self._workers[side.role].run(side.executable(case_plan.shape.name), case, _REPEATS)
        except UnsupportedByDeviceError as e:
            if not e.ended:
                return e
            self._failed.add(side.role)
            return self._sample(side, case_plan, case, e)
        except WorkerError as e:
            if e.ended:
                self._failed.add(side.role)
            return e

    def _sample(
        self, side: BuiltSide, case_plan: CasePlan, case: Case, timeout: UnsupportedByDeviceError
    ) -> WorkerError:
        """Run a few blocks alone. Return their fault, else the timeout of the launch with the number of blocks."""
        executable = side.executable(case_plan.shape.name)
        self._workers[side.role].close()
        self._workers[side.role] = worker = self._make_worker()
        try:
            count = worker.sample(executable, case, _SAMPLE)
        except UnsupportedByDeviceError as e:
            return UnsupportedByDeviceError(f"{timeout}; nor was a part of it run: {e}", ended=True)
        except WorkerError as e:
            return e
        blocks = math.prod(executable.steps[0][1].grid)
        return UnsupportedByDeviceError(
            f"{timeout}; {count} of {blocks} blocks ran by themselves, without a fault", ended=True
        )

"""The memory check on the GPU for cases of each side, in a process of its own that an illegal access may end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from greenfast.device.memory_check import MOST_BYTES
from greenfast.device.session import RunResult, same_bits
from greenfast.device.worker import UnsupportedByDeviceError, Worker, WorkerError
from greenfast.judge.check_plan import CasePlan
from greenfast.judge.gates.sides import BuiltSide
from greenfast.judge.record_schema import Status
from greenfast.spec.problem import Case

#: What takes the place of the emulator's check, and what it leaves open.
NOT_COVERED = "not covered: races, barriers, fences, and accesses outside of a shared array"


class MemoryChecks:
    """Checks the first case of each shape. Use as a context manager, which ends the processes.

    A side is not checked further after a case whose process ended.
    """

    def __init__(self, sides: Sequence[BuiltSide], make_worker: Callable[[], Worker]) -> None:
        self._make_worker = make_worker
        self._workers: dict[str, Worker] = {}
        self._failed: set[str] = set()
        self._results: dict[str, dict[str, RunResult | WorkerError]] = {side.role: {} for side in sides}

    def __enter__(self) -> MemoryChecks:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._workers.values():
            worker.close()

    def run(self, side: BuiltSide, cell: CasePlan, case: Case, expected: RunResult) -> None:
        """Check a case, unless its shape has been checked. expected: what an ordinary run left."""
        results, shape = self._results[side.role], cell.shape.name
        if shape in results or side.role in self._failed:
            return
        if case.nbytes > MOST_BYTES:
            results[shape] = UnsupportedByDeviceError(f"the case has more than {MOST_BYTES >> 30} GiB")
            return
        if side.role not in self._workers:
            self._workers[side.role] = self._make_worker()
        try:
            result = self._workers[side.role].check_memory(side.executable(shape), case)
        except WorkerError as e:
            results[shape] = e
            if e.ended:
                self._failed.add(side.role)
            return
        if not same_bits(result.outputs, expected.outputs):
            differ = "the outputs are other bits than in ordinary memory"
            result = replace(result, violations=[*result.violations, differ])
        results[shape] = result

    def check_of(self, side: BuiltSide) -> tuple[Status, str]:
        """The status of a side, and the first fault, or what was checked."""
        results = self._results[side.role]
        for shape, result in results.items():
            fault = _fault_of(result)
            if fault:
                return "FAIL", f"{shape}: {fault}"
        checked = [shape for shape, result in results.items() if isinstance(result, RunResult)]
        lacking: dict[str, list[str]] = {}
        for shape, result in results.items():
            if isinstance(result, WorkerError):
                lacking.setdefault(str(result), []).append(shape)
        notes = "".join(f"; {', '.join(shapes)}: {why}" for why, shapes in lacking.items())
        if not checked:
            return "PENDING", notes.removeprefix("; ") or "no case ran"
        left_open = self.left_open(side)
        notes += f"; {left_open}" if left_open else ""
        return "PASS", f"no fault on {len(checked)} of {len(results)} shapes{notes}"

    def left_open(self, side: BuiltSide) -> str:
        """What the device could not check of any case of a side; empty if nothing."""
        results = self._results[side.role].values()
        return "; ".join(dict.fromkeys(note for r in results if isinstance(r, RunResult) for note in r.notes))


def _fault_of(result: RunResult | WorkerError) -> str:
    """What a result says against the kernel; empty if it says nothing."""
    if isinstance(result, UnsupportedByDeviceError):
        return ""
    if isinstance(result, WorkerError):
        return result.fault
    return "; ".join(result.violations)

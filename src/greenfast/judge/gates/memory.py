"""The memory check on the GPU. It runs in a separate process per implementation, which an illegal access may end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from greenfast.device.memory_check import MAX_BYTES
from greenfast.device.session import RunResult, same_bits
from greenfast.device.worker import UnsupportedByDeviceError, Worker, WorkerError
from greenfast.judge.check_plan import CasePlan
from greenfast.judge.gates.sides import BuiltSide
from greenfast.judge.record_schema import Status
from greenfast.spec.problem import Case

#: The faults that the memory check does not cover and the emulator does.
NOT_COVERED = "not covered: races, barriers, fences, and accesses outside of a shared array"


class MemoryChecks:
    """Memory checks of the first case of each shape. Use as a context manager, which ends the processes.

    The check of an implementation stops after a case that ended its process.
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

    def run(self, side: BuiltSide, case_plan: CasePlan, case: Case, expected: RunResult) -> None:
        """Check a case unless its shape has been checked. expected: the result of an ordinary run."""
        results, shape = self._results[side.role], case_plan.shape.name
        if shape in results or side.role in self._failed:
            return
        if case.nbytes > MAX_BYTES:
            results[shape] = UnsupportedByDeviceError(f"the case has more than {MAX_BYTES >> 30} GiB")
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
            difference = "the outputs are other bits than in ordinary memory"
            result = replace(result, violations=[*result.violations, difference])
        results[shape] = result

    def summarize(self, side: BuiltSide) -> tuple[Status, str]:
        """Return an implementation's status with its first fault, or with the number of checked shapes."""
        results = self._results[side.role]
        for shape, result in results.items():
            fault = _describe_fault(result)
            if fault:
                return "FAIL", f"{shape}: {fault}"
        checked = [shape for shape, result in results.items() if isinstance(result, RunResult)]
        unchecked: dict[str, list[str]] = {}
        for shape, result in results.items():
            if isinstance(result, WorkerError):
                unchecked.setdefault(str(result), []).append(shape)
        notes = "".join(f"; {', '.join(shapes)}: {error}" for error, shapes in unchecked.items())
        if not checked:
            return "PENDING", notes.removeprefix("; ") or "no case ran"
        limitations = self.list_unchecked(side)
        notes += f"; {limitations}" if limitations else ""
        return "PASS", f"no fault on {len(checked)} of {len(results)} shapes{notes}"

    def list_unchecked(self, side: BuiltSide) -> str:
        """Return the parts that the device could not check in an implementation's cases; empty if there are none."""
        results = self._results[side.role].values()
        return "; ".join(dict.fromkeys(note for r in results if isinstance(r, RunResult) for note in r.notes))


def _describe_fault(result: RunResult | WorkerError) -> str:
    """Return the kernel's fault in a result; empty if there is none."""
    if isinstance(result, UnsupportedByDeviceError):
        return ""
    if isinstance(result, WorkerError):
        return result.fault
    return "; ".join(result.violations)

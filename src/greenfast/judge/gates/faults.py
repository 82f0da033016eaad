"""Detection of faults that the outputs of a case do not show, for CORRECTNESS.

- The memory check on the GPU, in a separate process per implementation, because an illegal access may end it.
- Small cases on the emulator while a GPU runs all cases: it detects an access that hits other valid memory, a race
  without effect, and a read of shared memory that holds data of an earlier block.
- Asynchronous operations that a kernel does not wait for, from its PTX or its machine code.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import lru_cache

from greenfast.device.compiler import CompiledKernel
from greenfast.device.machine_code import disassemble, find_unawaited_stores
from greenfast.device.memory_check import MAX_BYTES
from greenfast.device.session import Executable, RunResult, same_bits
from greenfast.device.worker import UnsupportedByDeviceError, Worker, WorkerError
from greenfast.emulator.pending_at_exit import find_unawaited
from greenfast.judge.implementation import BuiltSide
from greenfast.judge.record_schema import Status
from greenfast.judge.request import CasePlan
from greenfast.spec.errors import MachineError, UnsupportedError
from greenfast.spec.problem import Case

#: The faults that the memory check does not cover and the emulator does.
NOT_COVERED = "not covered: races, barriers, fences, and accesses outside of a shared array"


class MemoryChecks:
    """Memory checks of the first case of each shape. Use as a context manager; it ends the processes.

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
    if isinstance(result, UnsupportedByDeviceError):
        return ""
    if isinstance(result, WorkerError):
        return result.fault
    return "; ".join(result.violations)


_REPEATS = 2
#: Number of blocks that run alone if the whole launch takes too long.
_SAMPLE = 4


class EmulatedRuns:
    """Runs of cases on the emulator, each in a process of its own, as many at once as there are processors.

    Use as a context manager; it ends the processes. An implementation skips the shapes that it does not support. If a
    case takes too long, a few of its blocks run alone, and their faults count.
    """

    def __init__(
        self, sides: Sequence[BuiltSide], case_plans: Sequence[CasePlan], make_worker: Callable[[], Worker]
    ) -> None:
        self.case_plans = tuple(case_plans)
        self._make_worker = make_worker
        self._sides = [side for side in sides if any(case_plan.shape.name in side.programs for case_plan in case_plans)]
        self._pool = ThreadPoolExecutor(len(os.sched_getaffinity(0)))
        self._started: dict[tuple[str, int], Future[RunResult | WorkerError]] = {}
        self._workers: list[Worker] = []
        self._closed = False

    def __enter__(self) -> EmulatedRuns:
        return self

    def __exit__(self, *_: object) -> None:
        self._closed = True
        self._pool.shutdown(wait=False, cancel_futures=True)
        for worker in self._workers:
            worker.close()
        self._pool.shutdown(wait=True)

    def start(self, case_plan: CasePlan, case: Case) -> None:
        """Queue a case of each implementation. It runs in the background."""
        for side in self._sides:
            if case_plan.shape.name in side.programs:
                key = side.role, self.case_plans.index(case_plan)
                self._started[key] = self._pool.submit(self._run, side.executable(case_plan.shape.name), case)

    def results(self) -> Mapping[tuple[str, int], RunResult | WorkerError]:
        """Wait for all cases. Return the results by role and index of the case plan."""
        return {key: run.result() for key, run in self._started.items()}

    def _start_worker(self) -> Worker:
        worker = self._make_worker()
        self._workers.append(worker)
        if self._closed:
            worker.close()
        return worker

    def _run(self, executable: Executable, case: Case) -> RunResult | WorkerError:
        try:
            with self._start_worker() as worker:
                return worker.run(executable, case, _REPEATS)
        except UnsupportedByDeviceError as e:
            return self._sample(executable, case, e) if e.ended else e
        except WorkerError as e:
            return e

    def _sample(self, executable: Executable, case: Case, timeout: UnsupportedByDeviceError) -> WorkerError:
        """Run a few blocks alone. Return their fault, else the timeout of the launch with the number of blocks."""
        try:
            with self._start_worker() as worker:
                count = worker.sample(executable, case, _SAMPLE)
        except UnsupportedByDeviceError as e:
            return UnsupportedByDeviceError(f"{timeout}; nor was a part of it run: {e}", ended=True)
        except WorkerError as e:
            return e
        blocks = math.prod(executable.steps[0][1].grid)
        return UnsupportedByDeviceError(
            f"{timeout}; {count} of {blocks} blocks ran by themselves, without a fault", ended=True
        )


def check_awaited(side: BuiltSide) -> tuple[Status, str] | None:
    """Return the status of an implementation's kernels with a reason; None if no kernel has asynchronous operations.

    FAIL: no path waits for an operation. PENDING: a path of the PTX does not wait for an operation, but this path may
    never be taken; or a kernel cannot be analysed.
    """
    pending = ""
    has_operations = False
    for _, kernel in side.distinct:
        status, text = _check_kernel(kernel)
        has_operations |= bool(text)
        if status == "FAIL":
            return status, f"{kernel.source.entry}: {text}"
        if status == "PENDING":
            pending = f"{kernel.source.entry}: {text}"
    if pending:
        return "PENDING", pending
    return ("PASS", "on every path to the end") if has_operations else None


@lru_cache(maxsize=256)
def _check_kernel(kernel: CompiledKernel) -> tuple[Status, str]:
    if not kernel.ptx:
        return _check_machine_code(kernel)
    try:
        unawaited = find_unawaited(kernel.ptx, kernel.source.entry)
    except UnsupportedError as e:
        return "PENDING", f"its PTX could not be followed: {e}"
    if not unawaited:
        return "PASS", "awaited" if any(mark in kernel.ptx for mark in (".bulk_group", "wgmma.mma_async")) else ""
    certain = [operation for operation in unawaited if operation.is_certain]
    return ("FAIL" if certain else "PENDING"), str((certain or unawaited)[0])


def _check_machine_code(kernel: CompiledKernel) -> tuple[Status, str]:
    """Check that some path from each store has a wait. Machine code does not show the groups of operations."""
    try:
        unawaited = find_unawaited_stores(disassemble(kernel.cubin, kernel.source.entry))
    except MachineError as e:
        return "PENDING", f"its machine code could not be followed: {e}"
    if unawaited:
        return "FAIL", f"{unawaited[0]}: no path from it to the end of the kernel waits for it"
    return "PASS", ""

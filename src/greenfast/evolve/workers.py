"""The processes of a search. Each holds the stages of the run, and may have a GPU of its own.

Evaluations are independent. Results are returned in the order of the candidates, so a run's log does not depend on
timing. A process that ends costs only its candidate.
"""

from __future__ import annotations

import functools
import os
import queue
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

import msgspec

from greenfast.device.python_process import PythonProcess
from greenfast.device.worker import WorkerError
from greenfast.evolve.manifest import Manifest
from greenfast.evolve.stages import StageResult, Stages
from greenfast.judge.request import device_info
from greenfast.spec.errors import UsageError
from greenfast.spec.facts import DeviceInfo

#: A call on the stages that can be pickled.
Job = Callable[[Stages], Any]
_LOST = "its worker ended twice while it was evaluated"
#: Environment variables for the thread counts of NumPy and PyTorch.
_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


class Workers(Protocol):
    """The interface of the evaluators."""

    def results(self, jobs: Sequence[Job]) -> Iterator[StageResult]:
        """Yield the result of each job, in order."""

    def start(self, slot: int, job: Job) -> Callable[[], Any]:
        """Start a job in one of the processes; return a function that waits for its result.

        It raises WorkerError if the process ends.
        """

    def close(self) -> None:
        """End the processes."""


class InProcess:
    """Evaluates in this process."""

    def __init__(self, stages: Stages) -> None:
        self._stages = stages

    def results(self, jobs: Sequence[Job]) -> Iterator[StageResult]:
        """Run the jobs one after another."""
        for job in jobs:
            yield job(self._stages)

    def start(self, slot: int, job: Job) -> Callable[[], Any]:
        """Return a function that runs the job."""
        return functools.partial(job, self._stages)

    def close(self) -> None:
        """Do nothing: the caller owns the stages."""


class ProcessPool:
    """Evaluates in processes of this machine. A process starts with its first job, and again after its end.

    The processes of ``concurrent.futures`` would import modules of the current folder.
    """

    def __init__(self, makes: Sequence[Callable[[], Stages]]) -> None:
        """makes: for each process, makes its stages there."""
        self._processes = [_StagesProcess(make) for make in makes]
        self._threads = ThreadPoolExecutor(len(makes))
        self._idle: queue.SimpleQueue[_StagesProcess] = queue.SimpleQueue()
        for process in self._processes:
            self._idle.put(process)

    def results(self, jobs: Sequence[Job]) -> Iterator[StageResult]:
        """Distribute the jobs; yield their results in order."""
        futures = [self._threads.submit(self._run, job) for job in jobs]
        try:
            for future in futures:
                yield future.result()
        finally:
            for future in futures:
                future.cancel()

    def _run(self, job: Job) -> StageResult:
        """Run a job in an idle process; after its end once more in a new one."""
        process = self._idle.get()
        try:
            for _ in range(2):
                try:
                    result: StageResult = process.call(job)
                    return result
                except _ProcessEndedError:
                    pass
            return StageResult(stage="BUILD", valid=False, feedback=_LOST)
        finally:
            self._idle.put(process)

    def start(self, slot: int, job: Job) -> Callable[[], Any]:
        """Return results as ``Workers.results``."""
        return self._threads.submit(self._processes[slot].call, job).result

    def close(self) -> None:
        """End the processes, including running jobs."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for process in self._processes:
            process.close()


class _ProcessEndedError(WorkerError):
    """A process ended during a job."""


class _StagesProcess:
    """A process that holds stages and runs one job at a time."""

    def __init__(self, make: Callable[[], Stages]) -> None:
        self._make = make
        self._process: PythonProcess | None = None
        self._lock = threading.Lock()  # close() is called in another thread
        self._closed = False

    def call(self, job: Job) -> Any:
        """Return the job's result or raise its error. Raises _ProcessEndedError."""
        with self._lock:
            if self._closed:
                raise _ProcessEndedError("the search is ending")
            if self._process is None:
                self._process = PythonProcess(_serve, self._make, in_current_folder=True)
            process = self._process
        try:
            process.connection.send(job)
            returned, value = process.connection.recv()
        except (EOFError, OSError):
            process.close()
            self._process = None
            raise _ProcessEndedError("its process ended") from None
        if not returned:
            raise value
        return value

    def close(self) -> None:
        with self._lock:
            self._closed = True
            if self._process is not None:
                self._process.close()


def _serve(connection: Connection, make: Callable[[], Stages]) -> None:
    """Answer jobs in a process until the pipe closes. An error of ``make`` belongs to the first job."""
    stages = None
    while True:
        job = connection.recv()
        try:
            stages = make() if stages is None else stages
            answer = True, job(stages)
        except Exception as e:
            answer = False, e
        connection.send(answer)


def make_workers(text: str, manifest: Manifest, folder: Path, stages: Stages) -> Workers:
    """Create evaluators from ``--workers``. Raises UsageError as ``read_workers`` does."""
    count = read_workers(text, manifest.batch)
    if count == 1:
        return InProcess(stages)
    for name in _THREADS:  # The new processes share the cores.
        os.environ.setdefault(name, "1")
    return ProcessPool([functools.partial(Stages, manifest, folder, gpu_follows=stages.gpu_follows)] * count)


def read_workers(text: str, batch: int) -> int:
    """Parse ``local:N``, or ``local``: a process per core, at most ``batch``. Raises UsageError for other texts."""
    match = re.fullmatch(r"local(?::([1-9]\d{0,3}))?", text)
    if match is None:
        raise UsageError(f"--workers {text!r}: allowed is local:N with N processes, such as local:8, and local")
    return int(match[1]) if match[1] else min(batch, len(os.sched_getaffinity(0)))


class GpuName(msgspec.Struct, frozen=True):
    """One GPU of a search. name: its number. kind: model; the same for all GPUs of a search."""

    name: str
    kind: str


def describe_gpus(numbers: Sequence[int], timeout_s: float) -> list[GpuName]:
    """Describe GPUs of this machine. Raises UsageError if their models differ, and MachineError as ``device_info``.

    The fastest tiling depends on the model, so speedups of several models cannot be ranked.
    """
    gpus = [_describe_gpu(n, device_info(n, timeout_s)) for n in numbers]
    if len({gpu.kind for gpu in gpus}) > 1:
        models = ", ".join(f"{gpu.name} is an {gpu.kind}" for gpu in gpus)
        raise UsageError(f"a search needs GPUs of one kind, and these are of several: {models}")
    return gpus


def _describe_gpu(number: int, info: DeviceInfo | None) -> GpuName:
    return GpuName(str(number), f"{info.name} ({info.sm_count} multiprocessors)" if info is not None else "")


@dataclass(frozen=True)
class GpuWorkers:
    """The GPUs of a search, and the processes that time candidates on them. One GPU needs no process of its own."""

    gpus: Sequence[GpuName]
    workers: Workers


def make_gpu_workers(numbers: Sequence[int], manifest: Manifest, folder: Path, stages: Stages) -> GpuWorkers | None:
    """Return the workers for these GPUs; None without GPUs. Raises as ``describe_gpus``."""
    if not numbers:
        return None
    if len(numbers) == 1:
        return GpuWorkers([_describe_gpu(numbers[0], stages.raced.device)], InProcess(stages))
    gpus = describe_gpus(numbers, manifest.timeout_s)
    return GpuWorkers(gpus, ProcessPool([functools.partial(Stages, manifest, folder, n) for n in numbers]))

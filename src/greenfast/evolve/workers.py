"""Evaluate candidates before they are timed: in this process, in several processes, or in Ray actors.

Evaluations are independent. Results are returned in the order of the candidates, so a run's log does not depend on
timing. A lost worker costs only its candidate.
"""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any, Protocol

from greenfast.evolve.manifest import Manifest
from greenfast.evolve.pools import ProcessPool
from greenfast.evolve.proposal import Candidate
from greenfast.evolve.stages import StageResult, Stages
from greenfast.spec.errors import UsageError
from greenfast.spec.extras import require

#: A method of ``Stages`` and its arguments.
Job = tuple[str, tuple[Any, ...]]
_LOST = "its worker ended twice while it was evaluated"


#: Environment variables for the thread counts of NumPy and PyTorch.
_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


class Workers(Protocol):
    """The interface of the evaluators."""

    def results(self, jobs: Sequence[Job]) -> Iterator[StageResult]:
        """Yield the result of each job, in order."""

    def close(self) -> None:
        """End the processes."""


def make_job(method: str, candidate: Candidate | None, *more: Any) -> Job:
    """Make the job that calls ``Stages.method(candidate, *more)``."""
    return method, (candidate, *more)


def make_workers(text: str, manifest: Manifest, folder: Path, stages: Stages) -> Workers:
    """Create evaluators from ``local:N`` or ``ray:ADDRESS``. Raises UsageError for other texts or a missing extra."""
    kind, value = read_workers(text)
    if kind == "ray":
        return RayWorkers(manifest, folder, value)
    return LocalWorkers(manifest, folder, int(value)) if int(value) > 1 else InProcess(stages)


def read_workers(text: str) -> tuple[str, str]:
    """Parse ``local:N`` or ``ray:ADDRESS`` into its two parts. Raises UsageError for other texts."""
    kind, _, value = text.partition(":")
    if (kind == "local" and re.fullmatch(r"[1-9]\d*", value)) or (kind == "ray" and value):
        return kind, value
    raise UsageError(f"--workers {text!r}: allowed are local:N, and ray:ADDRESS such as ray:auto or ray:local")


class InProcess:
    """Evaluates in this process."""

    def __init__(self, stages: Stages) -> None:
        self._stages = stages

    def results(self, jobs: Sequence[Job]) -> Iterator[StageResult]:
        """Run the jobs one after another."""
        for method, arguments in jobs:
            yield getattr(self._stages, method)(*arguments)

    def close(self) -> None:
        """Do nothing: the caller owns the stages."""


_stages: Stages | None = None


def _start(manifest: Manifest, folder: Path) -> None:
    """Create the stages in a process of a pool."""
    global _stages
    _stages = Stages(manifest, folder)


def _evaluate(method: str, arguments: tuple[Any, ...]) -> StageResult:
    assert _stages is not None
    result: StageResult = getattr(_stages, method)(*arguments)
    return result


class LocalWorkers:
    """Evaluates in processes of this machine."""

    def __init__(self, manifest: Manifest, folder: Path, count: int) -> None:
        self._settings = manifest, folder, count
        for name in _THREADS:  # for the new processes, which share the cores
            os.environ.setdefault(name, "1")
        self._pool = ProcessPool(count, _start, manifest, folder)

    def results(self, jobs: Sequence[Job]) -> Iterator[StageResult]:
        """Submit all jobs; yield their results in order."""
        futures = [self._submit(one) for one in jobs]
        try:
            for n, future in enumerate(futures):
                try:
                    yield future.result()
                except BrokenProcessPool:
                    yield self._retry(jobs[n])
                    futures[n + 1 :] = self._resubmit(jobs[n + 1 :], futures[n + 1 :])
        finally:
            for future in futures:
                future.cancel()

    def _submit(self, one: Job) -> Future[StageResult]:
        """Submit a job, to a new pool if a process of this one has ended."""
        try:
            return self._pool.submit(_evaluate, *one)
        except BrokenProcessPool:
            self.close()
            manifest, folder, count = self._settings
            self._pool = ProcessPool(count, _start, manifest, folder)
            return self._pool.submit(_evaluate, *one)

    def _retry(self, one: Job) -> StageResult:
        """Run one job alone in a new pool, to find out whether it or another job ended the pool."""
        try:
            return self._submit(one).result()
        except BrokenProcessPool:
            return StageResult(stage="BUILD", valid=False, feedback=_LOST)

    def _resubmit(self, jobs: Sequence[Job], futures: Sequence[Future[StageResult]]) -> list[Future[StageResult]]:
        """Return the finished futures, and new futures for the other jobs."""
        finished = [f.done() and not f.cancelled() and f.exception() is None for f in futures]
        return [f if done else self._submit(job) for job, f, done in zip(jobs, futures, finished, strict=True)]

    def close(self) -> None:
        """End the processes, including running jobs."""
        self._pool.close()


class RayWorkers:
    """Evaluates in Ray actors, one per CPU of the cluster. All machines must share the run's folder."""

    def __init__(self, manifest: Manifest, folder: Path, address: str) -> None:
        """address: ``local`` starts a cluster on this machine. Raises UsageError if Ray or the cluster is missing."""
        require("greenfast evolve --workers ray:...", "ray")
        self._ray = ray = importlib.import_module("ray")
        if not ray.is_initialized():
            try:
                ray.init(address=address, include_dashboard=False, log_to_driver=False, logging_level="error")
            except (ConnectionError, ValueError, RuntimeError) as e:
                raise UsageError(f"--workers ray:{address}: no such cluster: {str(e).splitlines()[0]}") from None
        self._actor = ray.remote(num_cpus=1, max_restarts=-1, max_task_retries=1)(Evaluator)
        count = max(1, int(ray.cluster_resources().get("CPU", 1)))
        self._actors = [self._actor.remote(manifest, folder) for _ in range(count)]

    def results(self, jobs: Sequence[Job]) -> Iterator[StageResult]:
        """Distribute the jobs over the actors; yield their results in order."""
        actors = self._actors
        asked = [actors[n % len(actors)].evaluate.remote(*one) for n, one in enumerate(jobs)]
        for reference in asked:
            try:
                yield self._ray.get(reference)
            except self._ray.exceptions.RayActorError:
                yield StageResult(stage="BUILD", valid=False, feedback=_LOST)

    def close(self) -> None:
        """End the actors."""
        for actor in self._actors:
            self._ray.kill(actor)
        self._ray.shutdown()


class Evaluator:
    """The Ray actor."""

    def __init__(self, manifest: Manifest, folder: Path) -> None:
        self._stages = Stages(manifest, folder)

    def evaluate(self, method: str, arguments: tuple[Any, ...]) -> StageResult:
        """Run one job."""
        result: StageResult = getattr(self._stages, method)(*arguments)
        return result

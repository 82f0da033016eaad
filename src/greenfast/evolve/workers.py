"""Who evaluates candidates before the race: this process, several here, or Ray's actors on several machines.

Evaluations are independent; results come in the order of the candidates, so that a run's log does not depend on who was
first. A worker that is lost costs its candidate only.
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


#: How many threads NumPy's and PyTorch's libraries start.
_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


class Workers(Protocol):
    """Whoever evaluates."""

    def results(self, jobs: Sequence[Job]) -> Iterator[StageResult]:
        """What each job found, in order."""

    def close(self) -> None:
        """End the processes."""


def job(method: str, candidate: Candidate | None, *more: Any) -> Job:
    """``Stages.method(candidate, *more)``."""
    return method, (candidate, *more)


def make_workers(text: str, manifest: Manifest, folder: Path, stages: Stages) -> Workers:
    """``local:N`` or ``ray:ADDRESS``. Raises UsageError for anything else, and for an extra that is missing."""
    kind, value = read_workers(text)
    if kind == "ray":
        return OnRay(manifest, folder, value)
    return Local(manifest, folder, int(value)) if int(value) > 1 else Here(stages)


def read_workers(text: str) -> tuple[str, str]:
    """``local`` and a number, or ``ray`` and an address. Raises UsageError for anything else."""
    kind, _, value = text.partition(":")
    if (kind == "local" and re.fullmatch(r"[1-9]\d*", value)) or (kind == "ray" and value):
        return kind, value
    raise UsageError(f"--workers {text!r}: allowed are local:N, and ray:ADDRESS such as ray:auto or ray:local")


class Here:
    """This process."""

    def __init__(self, stages: Stages) -> None:
        self._stages = stages

    def results(self, jobs: Sequence[Job]) -> Iterator[StageResult]:
        """One after another."""
        for method, arguments in jobs:
            yield getattr(self._stages, method)(*arguments)

    def close(self) -> None:
        """Nothing: the stages are closed by who made them."""


_stages: Stages | None = None


def _start(manifest: Manifest, folder: Path) -> None:
    """In a process of a pool."""
    global _stages
    _stages = Stages(manifest, folder)


def _evaluate(method: str, arguments: tuple[Any, ...]) -> StageResult:
    assert _stages is not None
    found: StageResult = getattr(_stages, method)(*arguments)
    return found


class Local:
    """Processes of this machine."""

    def __init__(self, manifest: Manifest, folder: Path, count: int) -> None:
        self._asked = manifest, folder, count
        for name in _THREADS:  # of the processes that are started from here on: they share the cores
            os.environ.setdefault(name, "1")
        self._pool = ProcessPool(count, _start, manifest, folder)

    def results(self, jobs: Sequence[Job]) -> Iterator[StageResult]:
        """All at once."""
        futures = [self._submit(one) for one in jobs]
        try:
            for n, future in enumerate(futures):
                try:
                    yield future.result()
                except BrokenProcessPool:
                    yield self._again(jobs[n])
                    futures[n + 1 :] = self._submitted(jobs[n + 1 :], futures[n + 1 :])
        finally:
            for future in futures:
                future.cancel()

    def _submit(self, one: Job) -> Future[StageResult]:
        """One job, in a new pool where a process of this one has ended."""
        try:
            return self._pool.submit(_evaluate, *one)
        except BrokenProcessPool:
            self.close()
            manifest, folder, count = self._asked
            self._pool = ProcessPool(count, _start, manifest, folder)
            return self._pool.submit(_evaluate, *one)

    def _again(self, one: Job) -> StageResult:
        """The pool has ended, perhaps by another job: this one alone, in a new pool, says whose fault it was."""
        try:
            return self._submit(one).result()
        except BrokenProcessPool:
            return StageResult(stage="BUILD", valid=False, feedback=_LOST)

    def _submitted(self, jobs: Sequence[Job], before: Sequence[Future[StageResult]]) -> list[Future[StageResult]]:
        """The futures that still have an answer, and the others' jobs in the new pool."""
        answered = [f.done() and not f.cancelled() and f.exception() is None for f in before]
        return [f if done else self._submit(one) for one, f, done in zip(jobs, before, answered, strict=True)]

    def close(self) -> None:
        """End the processes, whatever they are doing."""
        self._pool.close()


class OnRay:
    """Actors of a Ray cluster, one for each of its CPUs; the run's folder must be on a disk that all of them see."""

    def __init__(self, manifest: Manifest, folder: Path, address: str) -> None:
        """address: ``local`` starts a cluster of this machine. Raises UsageError where Ray is missing or not there."""
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
        """All at once, each actor one after another."""
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
    """An actor of Ray."""

    def __init__(self, manifest: Manifest, folder: Path) -> None:
        self._stages = Stages(manifest, folder)

    def evaluate(self, method: str, arguments: tuple[Any, ...]) -> StageResult:
        """What one job found."""
        found: StageResult = getattr(self._stages, method)(*arguments)
        return found

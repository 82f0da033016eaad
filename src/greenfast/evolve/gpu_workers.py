"""Who races on several GPUs: a process for each of them, on this machine or as an actor of Ray.

Each has its own baseline, so that no comparison mixes devices.
"""

from __future__ import annotations

import functools
import importlib
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any, Protocol

import msgspec

from greenfast.device.worker import WorkerError
from greenfast.evolve.halving import HalvingResult, race
from greenfast.evolve.manifest import Manifest
from greenfast.evolve.pools import ProcessPool
from greenfast.evolve.proposal import Candidate
from greenfast.evolve.stages import Stages
from greenfast.judge.environment import device_info
from greenfast.spec.errors import UsageError
from greenfast.spec.facts import DeviceInfo

#: Seconds that Ray may take to start an actor again.
_RESTART_S = 30.0
#: A race and the seconds that it took.
Ran = tuple[HalvingResult, float]


class GpuName(msgspec.Struct, frozen=True):
    """One of the GPUs of a search. name: its number, on Ray with its machine. kind: what is the same of all of them."""

    name: str
    kind: str


class GpuWorkers(Protocol):
    """Whoever races."""

    gpus: Sequence[GpuName]

    def start(self, place: int, candidates: Sequence[Candidate], seed: int) -> Callable[[], Ran]:
        """Begin a race on ``gpus[place]``; what is returned waits for it, and raises WorkerError for a lost GPU."""

    def close(self) -> None:
        """End the processes."""


def describe_local_gpus(numbers: Sequence[int], timeout_s: float) -> list[GpuName]:
    """GPUs of this machine. Raises UsageError where they are of several kinds, MachineError as ``device_info``."""
    gpus = [GpuName(str(n), _kind(device_info(n, timeout_s))) for n in numbers]
    _check_kinds(gpus)
    return gpus


def _kind(info: DeviceInfo | None) -> str:
    return f"{info.name} ({info.sm_count} multiprocessors)" if info is not None else ""


def _check_kinds(gpus: Sequence[GpuName]) -> None:
    """Which tiling is fastest depends on the kind, so speedups of two kinds cannot be ranked."""
    if len({gpu.kind for gpu in gpus}) > 1:
        found = ", ".join(f"{gpu.name} is an {gpu.kind}" for gpu in gpus)
        raise UsageError(f"a search races on GPUs of one kind, and these are of several: {found}")


class GpuWorker:
    """One GPU's process."""

    def __init__(self, make: Callable[[], Stages]) -> None:
        """make: called with the first race, so that what it raises is that race's."""
        self._stages = functools.cache(make)

    def gpu(self) -> GpuName:
        """Its GPU, of a cluster."""
        seen = os.environ.get("CUDA_VISIBLE_DEVICES", "0")
        return GpuName(f"{os.uname().nodename}/{seen}", _kind(self._stages().raced.device))

    def race(self, candidates: Sequence[Candidate], seed: int) -> Ran:
        """A race, as ``race`` makes it."""
        stages, start = self._stages(), time.perf_counter()
        return race(stages, candidates, seed), time.perf_counter() - start


_racer: GpuWorker | None = None


def _begin(make: Callable[[], Stages]) -> None:
    """In a new process."""
    global _racer
    _racer = GpuWorker(make)


def _race(candidates: Sequence[Candidate], seed: int) -> Ran:
    assert _racer is not None
    return _racer.race(candidates, seed)


class LocalGpuWorkers:
    """GPUs of this machine."""

    def __init__(self, gpus: Sequence[GpuName], make: Callable[[int], Stages]) -> None:
        """make: of a GPU's number its stages; called in its process."""
        self.gpus = gpus
        self._make = make
        self._pools: dict[int, ProcessPool] = {}

    def start(self, place: int, candidates: Sequence[Candidate], seed: int) -> Callable[[], Ran]:
        """As the protocol says."""
        if place not in self._pools:
            self._pools[place] = ProcessPool(1, _begin, functools.partial(self._make, int(self.gpus[place].name)))
        try:
            future = self._pools[place].submit(_race, candidates, seed)
        except BrokenProcessPool:  # it ended since its last race
            self._pools.pop(place).close()
            return self.start(place, candidates, seed)

        def answer() -> Ran:
            try:
                return future.result()
            except BrokenProcessPool:
                self._pools.pop(place).close()
                raise WorkerError(f"the process that races on GPU {self.gpus[place].name} ended") from None

        return answer

    def close(self) -> None:
        """End the processes."""
        while self._pools:
            self._pools.popitem()[1].close()


class RayGpuWorkers:
    """GPUs of a Ray cluster that this process is connected to: an actor for each, which sees no other one."""

    def __init__(self, make: Callable[[int], Stages]) -> None:
        """make: of a GPU's number its stages. Raises UsageError where the GPUs are of several kinds."""
        self._ray: Any = importlib.import_module("ray")
        # no CPU: those are the other workers'. A race is not repeated on the same GPU.
        actor = self._ray.remote(num_cpus=0, num_gpus=1, max_restarts=-1, max_task_retries=0)(GpuWorker)
        count = int(self._ray.cluster_resources().get("GPU", 0))
        self._actors = [actor.remote(functools.partial(make, 0)) for _ in range(count)]
        self.gpus: Sequence[GpuName] = self._ray.get([one.gpu.remote() for one in self._actors])
        _check_kinds(self.gpus)
        self._ended: set[int] = set()

    def start(self, place: int, candidates: Sequence[Candidate], seed: int) -> Callable[[], Ran]:
        """As the protocol says."""
        if place in self._ended:
            self._ended.remove(place)
            self._wait(place)
        reference = self._actors[place].race.remote(candidates, seed)

        def answer() -> Ran:
            try:
                found: Ran = self._ray.get(reference)
            except self._ray.exceptions.RayActorError as e:
                self._ended.add(place)
                raise WorkerError(f"the actor that races on GPU {self.gpus[place].name} ended") from e
            return found

        return answer

    def _wait(self, place: int) -> None:
        """Until an actor that ended has been started anew; not for long, as its machine may be gone."""
        until, failures = time.monotonic() + _RESTART_S, self._ray.exceptions
        while time.monotonic() < until:
            try:
                self._ray.get(self._actors[place].gpu.remote(), timeout=_RESTART_S)
                return
            except (failures.RayActorError, failures.GetTimeoutError):
                time.sleep(0.5)

    def close(self) -> None:
        """End the actors."""
        for actor in self._actors:
            self._ray.kill(actor)


def make_gpu_workers(workers: str, manifest: Manifest, folder: Path, numbers: Sequence[int]) -> GpuWorkers | None:
    """Who races where there is more than one GPU, else None: then the search's own process does.

    numbers: of this machine's GPUs. With ``--device all`` and workers on Ray, which is connected, the cluster's GPUs.
    Raises UsageError where they are of several kinds.
    """
    make = functools.partial(Stages, manifest, folder)
    if numbers and manifest.device == "all" and workers.startswith("ray:"):
        racers = RayGpuWorkers(make)
        if len(racers.gpus) > 1:
            return racers
        racers.close()
    return LocalGpuWorkers(describe_local_gpus(numbers, manifest.timeout_s), make) if len(numbers) > 1 else None

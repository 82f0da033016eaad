"""Time candidates on several GPUs: one process per GPU, on this machine or as a Ray actor.

Each process times its own baseline, so no comparison mixes devices.
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
from greenfast.evolve.halving import HalvingResult, run_halving
from greenfast.evolve.manifest import Manifest
from greenfast.evolve.pools import ProcessPool
from greenfast.evolve.proposal import Candidate
from greenfast.evolve.stages import Stages
from greenfast.judge.environment import device_info
from greenfast.spec.errors import UsageError
from greenfast.spec.facts import DeviceInfo

#: Seconds allowed for Ray to restart an actor.
_RESTART_S = 30.0
#: A result and the seconds that it took.
TimedHalving = tuple[HalvingResult, float]


class GpuName(msgspec.Struct, frozen=True):
    """One GPU of a search.

    name: its number, with the host name on Ray. kind: model; the same for all GPUs of a search.
    """

    name: str
    kind: str


class GpuWorkers(Protocol):
    """The interface of the GPU processes of a search."""

    gpus: Sequence[GpuName]

    def start(self, slot: int, candidates: Sequence[Candidate], seed: int) -> Callable[[], TimedHalving]:
        """Start timing on ``gpus[slot]``; return a function that waits for the result.

        It raises WorkerError for a lost GPU.
        """

    def close(self) -> None:
        """End the processes."""


def describe_local_gpus(numbers: Sequence[int], timeout_s: float) -> list[GpuName]:
    """Describe GPUs of this machine. Raises UsageError if their models differ, and MachineError as ``device_info``."""
    gpus = [GpuName(str(n), _kind(device_info(n, timeout_s))) for n in numbers]
    _check_kinds(gpus)
    return gpus


def _kind(info: DeviceInfo | None) -> str:
    return f"{info.name} ({info.sm_count} multiprocessors)" if info is not None else ""


def _check_kinds(gpus: Sequence[GpuName]) -> None:
    """Raise UsageError for several models: the fastest tiling depends on the model, so speedups cannot be ranked."""
    if len({gpu.kind for gpu in gpus}) > 1:
        models = ", ".join(f"{gpu.name} is an {gpu.kind}" for gpu in gpus)
        raise UsageError(f"a search needs GPUs of one kind, and these are of several: {models}")


class GpuWorker:
    """The state of one GPU's process."""

    def __init__(self, make: Callable[[], Stages]) -> None:
        """make: called by the first method, so that its errors belong to that call."""
        self._stages = functools.cache(make)

    def gpu(self) -> GpuName:
        """Return the GPU of this process in a cluster."""
        number = os.environ.get("CUDA_VISIBLE_DEVICES", "0")
        return GpuName(f"{os.uname().nodename}/{number}", _kind(self._stages().raced.device))

    def run_halving(self, candidates: Sequence[Candidate], seed: int) -> TimedHalving:
        """Run ``halving.run_halving`` and measure its seconds."""
        stages, start = self._stages(), time.perf_counter()
        return run_halving(stages, candidates, seed), time.perf_counter() - start


_worker: GpuWorker | None = None


def _start_process(make: Callable[[], Stages]) -> None:
    """Create the worker of a new process."""
    global _worker
    _worker = GpuWorker(make)


def _run_halving(candidates: Sequence[Candidate], seed: int) -> TimedHalving:
    assert _worker is not None
    return _worker.run_halving(candidates, seed)


class LocalGpuWorkers:
    """Processes for the GPUs of this machine."""

    def __init__(self, gpus: Sequence[GpuName], make: Callable[[int], Stages]) -> None:
        """make: creates the stages for a GPU's number; called in that GPU's process."""
        self.gpus = gpus
        self._make = make
        self._pools: dict[int, ProcessPool] = {}

    def start(self, slot: int, candidates: Sequence[Candidate], seed: int) -> Callable[[], TimedHalving]:
        """As the protocol says."""
        if slot not in self._pools:
            self._pools[slot] = ProcessPool(1, _start_process, functools.partial(self._make, int(self.gpus[slot].name)))
        try:
            future = self._pools[slot].submit(_run_halving, candidates, seed)
        except BrokenProcessPool:  # it ended after its previous job
            self._pools.pop(slot).close()
            return self.start(slot, candidates, seed)

        def wait() -> TimedHalving:
            try:
                return future.result()
            except BrokenProcessPool:
                self._pools.pop(slot).close()
                raise WorkerError(f"the process of GPU {self.gpus[slot].name} ended") from None

        return wait

    def close(self) -> None:
        """End the processes."""
        while self._pools:
            self._pools.popitem()[1].close()


class RayGpuWorkers:
    """Ray actors, one per GPU of the connected cluster. Each actor sees only its own GPU."""

    def __init__(self, make: Callable[[int], Stages]) -> None:
        """make: creates the stages for a GPU's number. Raises UsageError if the GPUs' models differ."""
        self._ray: Any = importlib.import_module("ray")
        # No CPU: the CPUs belong to the other workers. A failed job is not retried on the same GPU.
        actor = self._ray.remote(num_cpus=0, num_gpus=1, max_restarts=-1, max_task_retries=0)(GpuWorker)
        count = int(self._ray.cluster_resources().get("GPU", 0))
        self._actors = [actor.remote(functools.partial(make, 0)) for _ in range(count)]
        self.gpus: Sequence[GpuName] = self._ray.get([actor.gpu.remote() for actor in self._actors])
        _check_kinds(self.gpus)
        self._ended: set[int] = set()

    def start(self, slot: int, candidates: Sequence[Candidate], seed: int) -> Callable[[], TimedHalving]:
        """As the protocol says."""
        if slot in self._ended:
            self._ended.remove(slot)
            self._wait_for_restart(slot)
        reference = self._actors[slot].run_halving.remote(candidates, seed)

        def wait() -> TimedHalving:
            try:
                result: TimedHalving = self._ray.get(reference)
            except self._ray.exceptions.RayActorError as e:
                self._ended.add(slot)
                raise WorkerError(f"the actor of GPU {self.gpus[slot].name} ended") from e
            return result

        return wait

    def _wait_for_restart(self, slot: int) -> None:
        """Wait until Ray has restarted an actor, for at most ``_RESTART_S``: its machine may be gone."""
        until, failures = time.monotonic() + _RESTART_S, self._ray.exceptions
        while time.monotonic() < until:
            try:
                self._ray.get(self._actors[slot].gpu.remote(), timeout=_RESTART_S)
                return
            except (failures.RayActorError, failures.GetTimeoutError):
                time.sleep(0.5)

    def close(self) -> None:
        """End the actors."""
        for actor in self._actors:
            self._ray.kill(actor)


def make_gpu_workers(workers: str, manifest: Manifest, folder: Path, numbers: Sequence[int]) -> GpuWorkers | None:
    """Create the processes for several GPUs. Return None for one GPU: the search's own process then times candidates.

    numbers: GPUs of this machine. With ``--device all`` and workers on a connected Ray cluster, its GPUs are used.
    Raises UsageError if the GPUs' models differ.
    """
    make = functools.partial(Stages, manifest, folder)
    if numbers and manifest.device == "all" and workers.startswith("ray:"):
        gpu_workers = RayGpuWorkers(make)
        if len(gpu_workers.gpus) > 1:
            return gpu_workers
        gpu_workers.close()
    return LocalGpuWorkers(describe_local_gpus(numbers, manifest.timeout_s), make) if len(numbers) > 1 else None

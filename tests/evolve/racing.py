"""Fake devices to race on: kernels have given times, faults, and a device may be slower than another one."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from greenfast.device.session import Block, Started, WrongLaunch
from greenfast.device.worker import WorkerError
from greenfast.evolve.proposal import Candidate
from greenfast.evolve.stages import StageResult
from greenfast.evolve.workers import GpuName, GpuWorkers
from greenfast.spec.problem import Case

BASELINE, BASELINE_US = "baseline", 100.0


class FakeWorker:
    """Times by a kernel's name, which is the value of the candidate's parameter; the baseline's is its own."""

    def __init__(self, stages: FakeStages) -> None:
        self._stages, self._rng = stages, random.Random(0)
        self._drift = 1.0
        self._names: dict[str, str] = {}

    def __enter__(self) -> FakeWorker:
        self._stages.starts += 1
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def prepare(self, key: str, executable: Any, cases: Any, warmup: int, seed: int) -> Started:
        name = self._names[key] = executable
        fault = self._stages.faults.get(name)
        if fault == "crash":
            raise WorkerError("crash: the process ended")
        if fault == "ends the racer":
            os._exit(3)
        return Started(["other" if fault == "bits" else "bits"] * len(cases))

    def time(self, key: str, warmup: int, iters: int, cold: bool, seed: int) -> Block:
        name = self._names[key]
        self._stages.launches[name] = self._stages.launches.get(name, 0) + iters
        wrong = WrongLaunch(3, iters, 0, "left other bits") if self._stages.faults.get(name) == "late" else None
        self._drift *= 1.002  # the clock falls all the time; pairs see the same
        us = self._stages.times[name] * self._drift * self._rng.uniform(0.99, 1.01)
        return Block([us] * iters, {"sm_mhz": 1700.0}, wrong)


class FakeStages:
    """Stages whose candidates have given times, and faults by name."""

    gpu = 0
    progress = staticmethod(lambda text: None)

    def __init__(
        self, times: Sequence[float] = (), faults: Mapping[str, str] | None = None, slower: float = 1.0
    ) -> None:
        """slower: how much longer than another device this one takes for everything."""
        named = {str(n): us for n, us in enumerate(times)} | {BASELINE: BASELINE_US}
        self.times = {name: us * slower for name, us in named.items()}
        self.faults, self.launches, self.starts = faults or {}, dict[str, int](), 0
        shape = SimpleNamespace(name="s", dims={"R": 8})
        self.raced = SimpleNamespace(
            make_worker=lambda: FakeWorker(self), shapes=[shape], seeds=[0], format="f", device=None
        )
        problem = SimpleNamespace(make_case=lambda dims, seed, fmt: Case({}, {}))
        self.task = SimpleNamespace(problem=problem)

    def on_gpu(self, candidate: Candidate | None) -> tuple[StageResult, Any, dict[tuple[str, int], str]]:
        name = BASELINE if candidate is None else str(*candidate.parameters.values())
        if self.faults.get(name) == "wrong":
            return StageResult(stage="CORRECTNESS", valid=False, feedback="kernel_bound"), None, {}
        side = SimpleNamespace(executable=lambda shape: name)
        return StageResult(stage="CORRECTNESS", valid=True), side, {("s", seed): "bits" for seed in range(3)}


class FakeWorkers:
    """Several fake devices in this process."""

    def __init__(self, devices: Sequence[FakeStages], dies: Callable[[int, list[str]], bool] | None = None) -> None:
        """dies: whether a device is lost in a race, by its slot and who races."""
        self._devices, self._dies = devices, dies or (lambda slot, names: False)
        self.started: list[tuple[int, list[str]]] = []
        self.at_once: list[int] = []

    def results(self, jobs: Any) -> Any:
        raise NotImplementedError

    def start(self, slot: int, job: Any) -> Callable[[], Any]:
        names = [str(*candidate.parameters.values()) for candidate in job.keywords["candidates"]]
        self.started.append((slot, names))
        waited = len(self.started)

        def answer() -> Any:
            self.at_once.append(len(self.started) - waited + 1)
            if self._dies(slot, names):
                raise WorkerError(f"CUDA error on GPU {slot}")
            return job(self._devices[slot])[0], 2.0

        return answer

    def close(self) -> None:
        pass


def pid_of(stages: FakeStages) -> int:
    return os.getpid()


def sleep(stages: FakeStages) -> None:
    time.sleep(30)


def fake_gpus(devices: Sequence[FakeStages], dies: Callable[[int, list[str]], bool] | None = None) -> GpuWorkers:
    return GpuWorkers([GpuName(str(n), "fake") for n in range(len(devices))], FakeWorkers(devices, dies))


def in_a_process(gpu: int) -> Any:
    """Stages of a process of its own, which the second candidate ends."""
    return FakeStages([50, 80], {"1": "ends the racer"}, slower=1 + gpu)

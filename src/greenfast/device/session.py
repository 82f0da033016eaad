"""A session on a device, as worker processes serve it: run kernels on cases, check them, time them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from greenfast.device.gpu import Bound, Executable, Gpu
from greenfast.spec.errors import MachineError
from greenfast.spec.facts import DeviceInfo, KernelCounts
from greenfast.spec.kernel import PHASE_BUFFER
from greenfast.spec.problem import Array, Case


@dataclass(frozen=True)
class RunResult:
    """The outputs of one case, memory violations, and whether repeats agreed bit by bit.

    counts: what the kernel executed; None if the device does not count it, as on a GPU.
    """

    outputs: dict[str, Array]
    violations: list[str] = field(default_factory=list)
    repeatable: bool = True
    counts: KernelCounts | None = None


@dataclass(frozen=True)
class Block:
    """Consecutive timed launches of one kernel: device times in microseconds, and the clocks right after them."""

    samples_us: list[float]
    clocks: dict[str, float]


class Session(Protocol):
    """A device that runs kernels; every method can be called through a Worker."""

    def info(self) -> DeviceInfo:
        """The device."""

    def run(self, executable: Executable, case: Case, repeats: int) -> RunResult:
        """Run a case ``repeats`` times, each in separate memory, and compare the outputs bit by bit."""

    def prepare(self, key: str, executable: Executable, case: Case, warmup: int) -> None:
        """Bind a case under a key for timing, and warm up."""

    def time(self, key: str, warmup: int, iters: int, cold: bool) -> Block:
        """Time one block of launches of a prepared case."""

    def finish(self, key: str) -> RunResult:
        """The outputs that the last timed launch left, checked as after a run; frees the case."""

    def phases(self, executable: Executable, case: Case, repeats: int) -> dict[str, float]:
        """Mean SM cycles per block and phase of an instrumented build, after one run to warm up."""

    def phase_counts(self, executable: Executable, case: Case) -> dict[str, KernelCounts]:
        """What each phase of an instrumented build executes; MachineError if the device does not count it."""


def same_bits(a: dict[str, Array], b: dict[str, Array]) -> bool:
    """Whether two sets of outputs are equal bit by bit (NaN included)."""
    return all(a[name].tobytes() == b[name].tobytes() for name in a)


class GpuSession:
    """A Session on one GPU."""

    def __init__(self, ordinal: int) -> None:
        self._gpu = Gpu(ordinal)
        self._bound: dict[str, Bound] = {}

    def info(self) -> DeviceInfo:
        """The device."""
        return self._gpu.info()

    def run(self, executable: Executable, case: Case, repeats: int) -> RunResult:
        """Run a case ``repeats`` times, each in separate memory, and compare the outputs bit by bit."""
        # Allocate all before freeing any, or the second would get the first one's addresses.
        bounds = [self._gpu.bind(executable, case) for _ in range(repeats)]
        results = [bound.run() for bound in bounds]
        violations = list(dict.fromkeys(v for bound in bounds for v in bound.violations()))
        for bound in bounds:
            bound.free()
        return RunResult(results[0], violations, all(same_bits(results[0], other) for other in results[1:]))

    def prepare(self, key: str, executable: Executable, case: Case, warmup: int) -> None:
        """Bind a case under a key for timing, and warm up."""
        bound = self._gpu.bind(executable, case)
        bound.run()
        for _ in range(warmup):
            bound.launch()
        self._gpu.stream.sync()
        self._bound[key] = bound

    def time(self, key: str, warmup: int, iters: int, cold: bool) -> Block:
        """Time one block of launches of a prepared case."""
        samples = self._gpu.time(self._bound[key], warmup, iters, cold=cold)
        return Block(samples, self._gpu.clocks())

    def finish(self, key: str) -> RunResult:
        """The outputs that the last timed launch left, checked as after a run; frees the case."""
        bound = self._bound.pop(key)
        result = RunResult(bound.outputs(), bound.violations())
        bound.free()
        return result

    def phases(self, executable: Executable, case: Case, repeats: int) -> dict[str, float]:
        """Mean SM cycles per block and phase of an instrumented build, after one run to warm up."""
        bound = self._gpu.bind(executable, case)
        bound.run()
        cycles = np.mean([bound.run()[PHASE_BUFFER].mean(axis=0) for _ in range(repeats)], axis=0)
        bound.free()
        return dict(zip(executable.phases, map(float, cycles), strict=True))

    def phase_counts(self, executable: Executable, case: Case) -> dict[str, KernelCounts]:
        """Raises MachineError: a GPU counts cycles per phase, not instructions."""
        raise MachineError("instructions are counted by phase in the emulator only")

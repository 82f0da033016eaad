"""The interface of a session on a device, served by worker processes, and its results."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from greenfast.device.executable import Executable
from greenfast.spec.facts import DeviceInfo, Finding, KernelCounts
from greenfast.spec.problem import Array, Case


@dataclass(frozen=True)
class RunResult:
    """The outputs of one case, memory violations, and whether repeats agreed bit by bit.

    counts: executed instructions; None if the device does not count, as on a GPU. notes: observations that are no
    violation. findings: of the emulator; formal findings are violations too.
    """

    outputs: dict[str, Array]
    violations: list[str] = field(default_factory=list)
    repeatable: bool = True
    counts: KernelCounts | None = None
    notes: list[str] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)


@dataclass(frozen=True)
class WrongLaunch:
    """A launch with a wrong result: its number from 1, the number of launches, the case from 0, and the fault."""

    number: int
    of: int
    case: int
    fault: str

    def __str__(self) -> str:
        return f"launch {self.number} of {self.of} {self.fault}"


@dataclass(frozen=True)
class Started:
    """The result of the launches before the timing.

    digests: of each case's first outputs. wrong: first wrong launch.
    """

    digests: list[str]
    wrong: WrongLaunch | None = None


@dataclass(frozen=True)
class Block:
    """Consecutive timed launches of one kernel: device times in microseconds, and the clocks halfway.

    wrong: the first launch with other bits than the first launch of its case.
    """

    samples_us: list[float]
    clocks: dict[str, float]
    wrong: WrongLaunch | None = None


class Session(Protocol):
    """A device that runs kernels; every method can be called through a Worker."""

    def info(self) -> DeviceInfo:
        """Describe the device."""

    def run(self, executable: Executable, case: Case, repeats: int) -> RunResult:
        """Run a case ``repeats`` times, each in separate memory, and compare the outputs bit by bit."""

    def check_memory(self, executable: Executable, case: Case) -> RunResult:
        """Run a case between unmapped pages and with different uninitialized memory (device/memory_check.py)."""

    def prepare(self, key: str, executable: Executable, cases: Sequence[Case], warmup: int, seed: int) -> Started:
        """Bind cases under a key for timing, launch each, and warm up. seed: as in ``time``."""

    def time(self, key: str, warmup: int, iters: int, cold: bool, seed: int) -> Block:
        """Time one block of launches, each with one of the key's cases (see Rotation.time).

        seed: of all random draws.
        """

    def finish(self, key: str) -> None:
        """Free the memory of a bound program."""

    def phases(self, executable: Executable, case: Case, repeats: int) -> dict[str, float]:
        """Mean SM cycles per block and phase of an instrumented build, after one run to warm up."""

    def phase_counts(self, executable: Executable, case: Case) -> dict[str, KernelCounts]:
        """Return the counts of each phase of an instrumented build.

        Raises MachineError if the device does not count.
        """


def same_bits(a: dict[str, Array], b: dict[str, Array]) -> bool:
    """Return whether two sets of outputs are equal bit by bit (including NaN)."""
    return all(a[name].tobytes() == b[name].tobytes() for name in a)


def output_digest(outputs: dict[str, Array]) -> str:
    """Return the SHA-256 of the bits of all outputs."""
    h = hashlib.sha256()
    for name in sorted(outputs):
        h.update(name.encode() + outputs[name].tobytes())
    return h.hexdigest()

"""The definition of a comparison: its backends, inputs and error limits; and the results of its session."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from benchmarks.records import BackendFacts, SpeedupPair
from greenfast.judge.task import Shape
from greenfast.spec.facts import LaunchFacts
from greenfast.spec.kernel import KernelSource


@dataclass(frozen=True)
class BenchCell:
    """One draw of inputs, and the backends that run on it.

    sampled: query rows per head that are compared with the references. series: the varied property if only errors are
    measured, ``inputs`` or ``length``; empty for a timed cell. grid: whether a timed shape counts for the mean.
    """

    shape: Shape
    backends: tuple[str, ...]
    inputs: str = "normal"
    seed: int = 0
    sampled: int = 256
    series: Literal["", "inputs", "length"] = ""
    grid: bool = False


@dataclass(frozen=True)
class ErrorLimits:
    """The limits of error, kernel_error and bound_ratio (as in CheckResult) for a correct output; None for no limit."""

    error: float | None = None
    kernel_error: float | None = None
    bound_ratio: float | None = None


@dataclass(frozen=True)
class Comparison:
    """The measurement of one command.

    what: greenfast's part in words; empty for "TASK: VARIANT". own: greenfast's backends; their outputs must be
    correct. versus: the time ratios to report. host: the inputs and backends for the host time.
    inputs: kind -> difference from N(0, 1). session: creates the session in its process, as ``session.BenchSession``.
    limits: of a correct output; None uses the gate of the task's own kernel, built for every cell. kernels: the timed
    kernels with their launches, if they are not the task's own; arch: their target.
    """

    name: str
    what: str
    own: tuple[str, ...]
    versus: tuple[SpeedupPair, ...]
    timed: tuple[BenchCell, ...]
    accuracy: tuple[BenchCell, ...]
    inputs: Mapping[str, str]
    session: Callable[[int], Any]
    flops: Callable[[Mapping[str, int]], float]
    bytes_moved: Callable[[Mapping[str, int]], int]
    host: BenchCell | None = None
    limits: ErrorLimits | None = None
    kernels: Callable[[], dict[str, tuple[KernelSource, LaunchFacts]]] | None = None
    arch: str = ""

    @property
    def contenders(self) -> list[str]:
        """The names of all backends, greenfast's first."""
        cells = (*self.timed, *self.accuracy, *([self.host] if self.host else []))
        return sorted(dict.fromkeys(n for cell in cells for n in cell.backends), key=lambda n: n not in self.own)


@dataclass(frozen=True)
class Facts:
    """The backends of a session with their versions, and other versions that affect the times."""

    backends: list[BackendFacts]
    versions: dict[str, str]


@dataclass(frozen=True)
class CheckResult:
    """The check of a backend's first output: errors as in ``record_schema.Row``.

    bound_ratio: largest ratio of an element's error to its rounding bound. finite: whether all elements are finite.
    reason: why it is not timed; empty otherwise.
    """

    error: float | None = None
    kernel_error: float | None = None
    bound_ratio: float | None = None
    finite: bool = False
    reason: str = ""


@dataclass(frozen=True)
class TimingResult:
    """Microseconds per call of each replay, and calls per replay, by backend.

    changed: backends with a different output after the timed launches than in the check.
    """

    samples_us: dict[str, list[float]]
    calls: dict[str, int]
    changed: list[str] = field(default_factory=list)
    clocks: dict[str, float] = field(default_factory=dict)

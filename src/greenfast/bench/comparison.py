"""What a comparison of contenders is: the contenders, their inputs, what is correct; and what its session answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from greenfast.bench.record_schema import BackendFacts, SpeedupPair
from greenfast.judge.task import Shape
from greenfast.spec.facts import LaunchFacts
from greenfast.spec.kernel import KernelSource


@dataclass(frozen=True)
class BenchCell:
    """One draw of inputs, and the contenders that compute on it.

    sampled: query rows of each head that are compared with the references. series: what varies where errors alone are
    measured, the ``inputs`` or the ``length``; empty where the contenders are timed. grid: whether a timed shape
    counts for the mean.
    """

    shape: Shape
    contenders: tuple[str, ...]
    inputs: str = "normal"
    seed: int = 0
    sampled: int = 256
    series: Literal["", "inputs", "length"] = ""
    grid: bool = False


@dataclass(frozen=True)
class ErrorLimits:
    """The largest error, kernel_error and bound_ratio (as in Checked) of a right output; None where none is asked."""

    error: float | None = None
    kernel_error: float | None = None
    bound_ratio: float | None = None


@dataclass(frozen=True)
class Comparison:
    """What one command measures.

    what: greenfast's part in it, in words; empty for "TASK: VARIANT". own: greenfast's contenders whose outputs must
    be correct. versus: the ratios of times to report. host: the inputs and contenders whose host time is measured.
    inputs: kind -> how it differs from N(0, 1). session: makes what measures in a process, as ``session.Session``
    does. limits: what a correct output is; None takes the gate of the task's own kernel, which is built for every cell.
    kernels: the kernels that are timed, with their launches, where the task's own kernel is not; arch: their target.
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
        """The names of all that take part, greenfast's first."""
        cells = (*self.timed, *self.accuracy, *([self.host] if self.host else []))
        return sorted(dict.fromkeys(n for cell in cells for n in cell.contenders), key=lambda n: n not in self.own)


@dataclass(frozen=True)
class Facts:
    """The contenders of a session with versions, and the versions of what else the times depend on."""

    contenders: list[BackendFacts]
    versions: dict[str, str]


@dataclass(frozen=True)
class CheckResult:
    """What a contender's first call left: errors as in ``record.Row``, and the worst element over its rounding bound.

    finite: whether every element of the output is. reason: why it is not timed; empty where it can be.
    """

    error: float | None = None
    kernel_error: float | None = None
    bound_ratio: float | None = None
    finite: bool = False
    reason: str = ""


@dataclass(frozen=True)
class TimingResult:
    """Microseconds per call of each replay, and calls per replay, by contender.

    changed: contenders whose timed launches left an output that differs from the checked one.
    """

    samples_us: dict[str, list[float]]
    calls: dict[str, int]
    changed: list[str] = field(default_factory=list)
    clocks: dict[str, float] = field(default_factory=dict)

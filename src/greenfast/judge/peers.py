"""A kernel beside its peers, libraries that compute the same: what such a run records, and what it asks of a task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import msgspec

from greenfast.judge.task import Shape

#: The contender that stands for the task's own kernel.
OWN = "greenfast"


class _Data(msgspec.Struct, frozen=True, kw_only=True):
    pass


class PeerContender(_Data, frozen=True, kw_only=True):
    """One of those who compute the same; ``missing`` says why it could not take part, and is empty where it could."""

    name: str
    label: str
    precision: Literal["fp8", "bf16"]
    version: str = ""
    missing: str = ""


class PeerRow(_Data, frozen=True, kw_only=True):
    """One contender on one shape; ``reason`` stands where there is no time.

    grid: whether the shape counts for the mean. cache: "warm" where a call's FP8 data fit into L2, else "beyond L2".
    median_us, p25_us, p75_us: of ``rounds`` replays of a graph of ``calls`` calls, per call. error: relative
    (Frobenius) against attention on the unquantized inputs; kernel_error: against exact arithmetic on the codes, for
    contenders that read the same codes as greenfast. clocks: while the shape was timed.
    """

    shape: str
    dims: dict[str, int]
    grid: bool
    contender: str
    method: str = "graph"
    cache: str
    median_us: float | None = None
    p25_us: float | None = None
    p75_us: float | None = None
    tflops: float | None = None
    rounds: int = 0
    calls: int = 0
    error: float | None = None
    kernel_error: float | None = None
    clocks: dict[str, float] = {}
    reason: str = ""


class PeerAccuracyRow(_Data, frozen=True, kw_only=True):
    """Errors of one contender, as in PeerRow. series: what varies, the ``inputs`` or the ``length``.

    sampled: query rows of each head that were compared.
    """

    series: Literal["inputs", "length"]
    inputs: str
    dims: dict[str, int]
    contender: str
    sampled: int
    error: float | None = None
    kernel_error: float | None = None
    reason: str = ""


@dataclass(frozen=True)
class AccuracyCell:
    """A shape on which errors alone are measured: of some contenders by name, all where none is named."""

    shape: Shape
    series: Literal["inputs", "length"]
    inputs: str
    sampled: int
    contenders: tuple[str, ...] = ()


@dataclass(frozen=True)
class Checked:
    """What one contender's first call left: errors as in PeerRow, and the worst element over what rounding explains.

    finite: whether every element of the output is. reason: why it is not timed; empty where it can be.
    """

    error: float | None = None
    kernel_error: float | None = None
    bound_ratio: float | None = None
    finite: bool = False
    reason: str = ""


@dataclass(frozen=True)
class Timed:
    """Microseconds per call of each replay, and calls per replay, by contender.

    changed: contenders whose timed launches left something else than what was checked.
    """

    samples_us: dict[str, list[float]]
    calls: dict[str, int]
    changed: list[str] = field(default_factory=list)
    clocks: dict[str, float] = field(default_factory=dict)


class Peers(Protocol):
    """What a task's module of peers offers, beside its session."""

    GRID: Sequence[Shape]
    SMALL: Sequence[Shape]
    ACCURACY: Sequence[AccuracyCell]
    PeerSession: Any

    def flops(self, dims: Mapping[str, int]) -> float:
        """Floating-point operations that a shape counts as."""

    def input_bytes(self, dims: Mapping[str, int]) -> int:
        """Bytes that a call must read and write, in the codes' format."""

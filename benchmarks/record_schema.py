"""The record of a comparison: ``python -m benchmarks peers``, ``operator``, ``serving`` and ``routing``."""

from __future__ import annotations

from typing import Literal

import msgspec

from greenfast.judge.record_schema import Run, Side, TimedKernel


class _RecordPart(msgspec.Struct, frozen=True, kw_only=True):
    pass


class BackendFacts(_RecordPart, frozen=True, kw_only=True):
    """A compared library or kernel.

    precision: of its matrix products; "none" without any. missing: why it was not measured; empty otherwise.
    """

    name: str
    label: str
    precision: Literal["fp8", "int8", "bf16", "none"]
    version: str = ""
    missing: str = ""


class SpeedupPair(_RecordPart, frozen=True, kw_only=True):
    """A ratio to report: the fastest time of ``baselines`` / the time of ``own``; above 1 ``own`` is faster.

    group: prefix of the names of its shapes; empty for all shapes.
    """

    own: str
    baselines: list[str] = msgspec.field(name="rivals")
    title: str
    group: str = ""


class Row(_RecordPart, frozen=True, kw_only=True):
    """One backend on one shape. reason: why there is no time; empty otherwise.

    grid: whether the shape counts for the mean. cache: "warm" if a call's data fit into L2, else "beyond L2".
    median_us, p25_us, p75_us: of ``rounds`` replays of a graph of ``calls`` calls, per call. tflops: None for a backend
    that does not compute a whole attention. error: relative (Frobenius) to float64 attention on the unrounded inputs.
    kernel_error: relative to exact arithmetic on the codes, for backends that read the task's codes. clocks: during the
    timing of the shape.
    """

    shape: str
    dims: dict[str, int]
    grid: bool
    backend: str = msgspec.field(name="contender")
    inputs: str = "normal"
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


class HostRow(_RecordPart, frozen=True, kw_only=True):
    """Host time of one eager call in microseconds: median and minimum of ``batches`` batches of ``calls`` calls."""

    backend: str = msgspec.field(name="contender")
    dims: dict[str, int]
    median_us: float
    least_us: float
    batches: int
    calls: int


class AccuracyRow(_RecordPart, frozen=True, kw_only=True):
    """The errors of one backend, as in Row. series: the varied property, ``inputs`` or ``length``.

    sampled: query rows per head that were compared.
    """

    series: Literal["inputs", "length"]
    inputs: str
    dims: dict[str, int]
    backend: str = msgspec.field(name="contender")
    sampled: int
    error: float | None = None
    kernel_error: float | None = None
    reason: str = ""


class Benchmark(Run, frozen=True, kw_only=True, tag_field="kind", tag="benchmark"):
    """The comparison of several backends in one run on one GPU.

    comparison: "peers", "operator", "serving" or "routing". what: greenfast's part in words. own: greenfast's backends.
    inputs: kind -> difference from N(0, 1). side: the task's own kernel with its builds, if it is a backend. kernels:
    otherwise each timed kernel, by step and shape.

    Raises ValueError as Record, and for a time of the task's own kernel without its error on that shape.
    """

    comparison: str
    what: str
    own: list[str]
    versus: list[SpeedupPair]
    backends: list[BackendFacts] = msgspec.field(name="contenders")
    rows: list[Row]
    host: list[HostRow] = msgspec.field(default_factory=list)
    accuracy: list[AccuracyRow] = msgspec.field(default_factory=list)
    inputs: dict[str, str] = msgspec.field(default_factory=dict)
    side: Side | None = None
    kernels: dict[str, TimedKernel] = msgspec.field(default_factory=dict)

    def __post_init__(self) -> None:
        timed = [row for row in self.rows if row.median_us is not None]
        self._require_correct(bool(timed))
        unchecked = [row for row in timed if self.side and row.backend in self.own and row.kernel_error is None]
        if unchecked:
            raise ValueError(f"{unchecked[0].shape}: a time of {unchecked[0].backend} without its error")

    def sides(self) -> list[tuple[str, Side]]:
        """Return the task's own kernel with its variant's name."""
        return [(self.side.variant, self.side)] if self.side else []

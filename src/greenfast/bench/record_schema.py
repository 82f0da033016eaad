"""The record of a comparison of contenders: ``greenfast bench peers``, ``operator`` and ``serving``."""

from __future__ import annotations

from typing import Literal

import msgspec

from greenfast.judge.record_schema import Run, Side, TimedKernel


class _RecordPart(msgspec.Struct, frozen=True, kw_only=True):
    pass


class BackendFacts(_RecordPart, frozen=True, kw_only=True):
    """A library or kernel that takes part; ``missing`` says why it could not, and is empty where it could.

    precision: of its products; "none" where it computes none.
    """

    name: str
    label: str
    precision: Literal["fp8", "int8", "bf16", "none"]
    version: str = ""
    missing: str = ""


class SpeedupPair(_RecordPart, frozen=True, kw_only=True):
    """A ratio to report: the time of the fastest of ``rivals`` over the time of ``own``; above 1 own is faster.

    group: what the names of its shapes begin with; empty for all.
    """

    own: str
    rivals: list[str]
    title: str
    group: str = ""


class Row(_RecordPart, frozen=True, kw_only=True):
    """One contender on one shape; ``reason`` stands where there is no time.

    grid: whether the shape counts for the mean. cache: "warm" where a call's data fit into L2, else "beyond L2".
    median_us, p25_us, p75_us: of ``rounds`` replays of a graph of ``calls`` calls, per call. tflops: None for what is
    no whole attention. error: relative (Frobenius) against float64 attention on the inputs before any rounding;
    kernel_error: against exact arithmetic on the codes, for contenders that read the task's codes. clocks: while the
    shape was timed.
    """

    shape: str
    dims: dict[str, int]
    grid: bool
    contender: str
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
    """Host time of one eager call in microseconds: median and least of ``batches`` batches of ``calls`` calls."""

    contender: str
    dims: dict[str, int]
    median_us: float
    least_us: float
    batches: int
    calls: int


class AccuracyRow(_RecordPart, frozen=True, kw_only=True):
    """Errors of one contender, as in Row. series: what varies, the ``inputs`` or the ``length``.

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


class Benchmark(Run, frozen=True, kw_only=True, tag_field="kind", tag="benchmark"):
    """Contenders compared in one run on one GPU.

    comparison: "peers", "operator" or "serving". what: greenfast's part in it, in words. own: greenfast's contenders.
    inputs: kind -> how it differs from N(0, 1). side: the task's own kernel, where it is a contender, with its builds.
    kernels: else each kernel that was timed, by its step and shape.

    Raises ValueError as Record does, and for a time of the task's own kernel without its error on that shape.
    """

    comparison: str
    what: str
    own: list[str]
    versus: list[SpeedupPair]
    contenders: list[BackendFacts]
    rows: list[Row]
    host: list[HostRow] = msgspec.field(default_factory=list)
    accuracy: list[AccuracyRow] = msgspec.field(default_factory=list)
    inputs: dict[str, str] = msgspec.field(default_factory=dict)
    side: Side | None = None
    kernels: dict[str, TimedKernel] = msgspec.field(default_factory=dict)

    def __post_init__(self) -> None:
        timed = [row for row in self.rows if row.median_us is not None]
        self._require_correct(bool(timed))
        unchecked = [row for row in timed if self.side and row.contender in self.own and row.kernel_error is None]
        if unchecked:
            raise ValueError(f"{unchecked[0].shape}: a time of {unchecked[0].contender} without its error")

    def sides(self) -> list[tuple[str, Side]]:
        """The task's own kernel, by its variant's name."""
        return [(self.side.variant, self.side)] if self.side else []

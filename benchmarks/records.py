"""Records of benchmarks: their types, how they are read and written, and whether their kernels equal today's."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

import msgspec

from greenfast.judge import record_io as judged
from greenfast.judge.record_schema import BenchRecord, PhaseRecord, Record, Run, Side, TimedKernel
from greenfast.judge.request import device_info, git_state, now, package_versions
from greenfast.judge.store import read_json, to_json, write_whole
from greenfast.spec.errors import UsageError


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


AnyRecord: TypeAlias = "Record | BenchRecord | PhaseRecord | Benchmark"


def read_record(run: Path) -> AnyRecord:
    """Read the record of a run from its folder or file. Shapes get the task's current names.

    Raises UsageError for any other path.
    """
    record: AnyRecord = judged.read_run(run, Record | BenchRecord | PhaseRecord | Benchmark)
    return record


def record_schema() -> dict[str, Any]:
    """Return the JSON Schema of record files of all kinds, those of the judge included."""
    return judged.record_schema(Record | BenchRecord | PhaseRecord | Benchmark)


def read_benchmark(run: Path) -> Benchmark:
    """Read the record of a comparison. Raises UsageError for any other record."""
    record = read_record(run)
    if not isinstance(record, Benchmark):
        raise UsageError(f"{run}: not a record of python -m benchmarks peers, operator, serving or routing")
    return record


class LinkRow(msgspec.Struct, frozen=True, kw_only=True):
    """An exchange of ``bytes`` that each rank sends and receives."""

    what: str
    bytes: int
    microseconds: float
    gigabytes: float


class CaseRow(msgspec.Struct, frozen=True, kw_only=True):
    """One backend on one case: the slowest rank's time of one call, over rounds.

    tflops: per GPU. error: relative to float64; 0 if the output is not attention over the whole sequence. peak_bytes:
    allocated by a call in addition to its inputs. exposed, idle, nccl: shares of a call, from a trace, maximum over the
    ranks: communication without computation, neither, and communication in total. model_ms: prediction of
    ``parallel/cost.py``.
    """

    case: str
    backend: str = msgspec.field(name="contender")
    dims: dict[str, int]
    causal: bool
    median_ms: float
    least_ms: float
    most_ms: float
    calls: int
    tflops: float
    error: float
    peak_bytes: int
    exposed: float | None
    idle: float | None
    nccl: float | None
    model_ms: float | None

    def line(self) -> str:
        """Format the row for a terminal."""
        shares = "" if self.exposed is None else f", exposed {self.exposed:.1%}, idle {self.idle:.1%}"
        model = "" if self.model_ms is None else f", model {self.model_ms:.3f} ms"
        error = f", error {self.error:.4f}" if self.error else ""
        return (
            f"{self.case:16} {self.backend:16} {self.median_ms:9.3f} ms {self.tflops:7.1f} TFLOP/s per GPU{error}, "
            f"{self.peak_bytes / 2**20:.0f} MiB{shares}{model}"
        )


class ParallelRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A run on ``ranks`` GPUs of one model. missing: backends that were not measured, with the reasons."""

    device: str
    ranks: int
    git: str
    packages: dict[str, str]
    torch: str
    nccl: str
    measured: str
    rounds: int
    links: list[LinkRow]
    rows: list[CaseRow]
    missing: dict[str, str]


def write_record(folder: Path, record: ParallelRecord) -> Path:
    """Write ``folder``/parallel.json; returns its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "parallel.json"
    write_whole(path, to_json(record))
    return path


def read_parallel(path: Path) -> ParallelRecord:
    """Read a record. Raises UsageError for any other file."""
    record: ParallelRecord = read_json(path, ParallelRecord, "record of python -m benchmarks parallel")
    return record


def write_measurements(path: Path | None, benchmark: str, device: Any, **content: Any) -> None:
    """Write the measurements of a benchmark without a record type, with their origin; nothing if ``path`` is None."""
    origin = {"created": now().isoformat(), "git": git_state(), "device": device, "environment": package_versions()}
    if path:
        write_whole(path, to_json({"benchmark": benchmark, **origin, **content}))


def write_run(args: argparse.Namespace, benchmark: str, packages: Sequence[str], runs: Sequence[Any]) -> None:
    """Write the runs of a benchmark of models with its options and the versions of more packages."""
    if args.json is None:
        return
    device = device_info(0 if args.device == "cuda" else None, 60.0)
    versions = {name: importlib.metadata.version(name) for name in packages if importlib.util.find_spec(name)}
    settings = {name: value for name, value in vars(args).items() if name != "json"}
    write_measurements(
        args.json, benchmark, device, environment=package_versions() | versions, settings=settings, runs=runs
    )

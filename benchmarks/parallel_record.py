"""The record of ``python -m benchmarks parallel``, a separate JSON file."""

from __future__ import annotations

from pathlib import Path

import msgspec

from greenfast.judge.store import read_json, to_json, write_whole


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

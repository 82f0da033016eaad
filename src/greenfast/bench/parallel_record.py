"""The record of ``greenfast bench parallel``, a JSON file of its own."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec

from greenfast.judge.store import write_whole
from greenfast.judge.strict_json import decode


class LinkRow(msgspec.Struct, frozen=True, kw_only=True):
    """An exchange of ``bytes`` that each rank sends and receives."""

    what: str
    bytes: int
    microseconds: float
    gigabytes: float


class CaseRow(msgspec.Struct, frozen=True, kw_only=True):
    """One contender on one case: the slowest rank's time of one call, over rounds.

    tflops: of each GPU. error: relative, against float64; 0 where the result is of a part alone, which is not compared.
    peak_bytes: that a call allocates in addition to its inputs. exposed: the share of a call in which a GPU only
    exchanges; idle: in which it does nothing; nccl: in which it exchanges at all; the largest of the ranks, from a
    trace. model_ms: what ``parallel/cost.py`` predicts.
    """

    case: str
    contender: str
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
        """The row for a terminal."""
        shares = "" if self.exposed is None else f", exposed {self.exposed:.1%}, idle {self.idle:.1%}"
        model = "" if self.model_ms is None else f", model {self.model_ms:.3f} ms"
        error = f", error {self.error:.4f}" if self.error else ""
        return (
            f"{self.case:16} {self.contender:16} {self.median_ms:9.3f} ms {self.tflops:7.1f} TFLOP/s per GPU{error}, "
            f"{self.peak_bytes / 2**20:.0f} MiB{shares}{model}"
        )


class ParallelRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A run on ``ranks`` GPUs of one kind. missing: contenders that were not measured, and why."""

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
    write_whole(path, json.dumps(msgspec.to_builtins(record), indent=1) + "\n")
    return path


def read_parallel(path: Path) -> ParallelRecord:
    """The record in a file. Raises msgspec.DecodeError for any other."""
    found: ParallelRecord = decode(path.read_bytes(), ParallelRecord)
    return found

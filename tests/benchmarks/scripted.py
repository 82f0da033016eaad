"""A session with scripted backends, in place of a worker on a GPU, and a listener that keeps the rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest

from benchmarks.comparison import BenchCell, CheckResult, Facts, TimingResult
from benchmarks.records import HostRow, Row
from benchmarks.registry import KERNEL, Backend
from benchmarks.sdpa_backends import BACKENDS
from greenfast.device.worker import Worker, WorkerError
from tests.fakes import Watcher

ABSENT = "cudnn"
RIGHT = CheckResult(error=0.05, kernel_error=0.02, bound_ratio=0.4, finite=True)
US = {KERNEL: 10.0, "fa3": 12.0}


@dataclass
class Session:
    """The scripted workers of one comparison, and a log of their requests."""

    backends: Mapping[str, Backend] = field(default_factory=lambda: BACKENDS)
    absent: tuple[str, ...] = (ABSENT,)
    us: Mapping[str, float] = field(default_factory=lambda: US)
    checked: dict[str, CheckResult] = field(default_factory=dict)  # by contender; RIGHT for the others
    crashes: set[tuple[int, str]] = field(default_factory=set)  # (length, contender)
    changed: list[str] = field(default_factory=list)
    starts: int = 0
    closed: int = 0
    rounds: list[int | None] = field(default_factory=list)
    opened: list[BenchCell] = field(default_factory=list)
    added: list[str] = field(default_factory=list)

    def facts(self, names: list[str]) -> Facts:
        def described(name: str) -> Any:
            missing = f"{name} is not installed" if name in self.absent else ""
            return msgspec.structs.replace(
                self.backends[name].describe(), version="" if missing else f"{name} 1.0", missing=missing
            )

        return Facts([described(name) for name in names], {"cuDNN": "91900"})

    def open(self, cell: BenchCell, kernel: Any) -> None:
        if KERNEL in cell.backends and self.backends is BACKENDS:
            image, plan = kernel
            assert image.entry == "fp8_attention"
            assert plan.grid[0] >= 1
        else:
            assert kernel is None
        self.opened.append(cell)
        self.added = []

    def add(self, name: str, timed: bool) -> CheckResult:
        if (self.opened[-1].shape.dims.get("S", 0), name) in self.crashes:
            raise WorkerError(f"crash: the process ended during add of {name}")
        found = self.checked.get(name, RIGHT if self.backends[name].attention else CheckResult(finite=True))
        if timed and not found.reason:
            self.added.append(name)
        return found

    def time(self, rounds: int | None) -> TimingResult:
        self.rounds.append(rounds)
        samples = {name: [self.us.get(name, 20.0) * (1 + 0.01 * n) for n in (4, 0, 2, 1, 3)] for name in self.added}
        return TimingResult(samples, dict.fromkeys(self.added, 7), self.changed, {"sm_mhz": 1980.0 - len(self.rounds)})

    def host(self, cell: BenchCell) -> list[HostRow]:
        return [
            HostRow(backend=n, dims=cell.shape.dims, median_us=2.0, least_us=1.0, batches=1, calls=1)
            for n in cell.backends
            if n not in self.absent
        ]


def install(monkeypatch: pytest.MonkeyPatch, session: Session) -> Session:
    """Let workers of comparisons be this session."""

    class HereWorker(Worker):
        def __init__(self, ordinal: int, *, timeout_s: float, make_session: object) -> None:
            assert ordinal == 0
            session.starts += 1

        def close(self) -> None:
            session.closed += 1

        def call(self, method: str, *args: Any) -> Any:
            return getattr(session, method)(*args)

    monkeypatch.setattr("benchmarks.runner.Worker", HereWorker)
    return session


@dataclass
class ComparisonWatcher(Watcher):
    cells: list[list[Row]] = field(default_factory=list)

    def cell(self, rows: Sequence[Row]) -> None:
        self.cells.append(list(rows))

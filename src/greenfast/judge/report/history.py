"""The runs of a kernel in the order of time: what a table and a drawing show of each."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from greenfast.judge.record_schema import BenchRecord, Build, Record, SpeedupRow
from greenfast.judge.report import facts, formatting

#: The columns of ``History.rows``.
HEADER = (
    "date",
    "commit",
    "decision",
    "p50 µs",
    "speedup",
    "interval",
    "required",
    "verdict",
    "machine code",
    "record",
)
NUMBERS = ("p50 µs", "speedup", "interval")


@dataclass(frozen=True)
class Point:
    """One run. p50s in microseconds, medians over seeds; None where the run did not measure one."""

    created: str
    commit: str
    decision: str
    baseline_us: float | None
    candidate_us: float | None
    speedup: SpeedupRow | None
    code: str
    path: str


@dataclass(frozen=True)
class History:
    """The runs of one kernel on one device, oldest first, on one shape and cache state."""

    title: str
    shape: str
    cache: str
    points: tuple[Point, ...]

    def rows(self) -> list[tuple[str, ...]]:
        """A row per run."""
        return [
            (
                p.created[:16].replace("T", " "),
                p.commit,
                p.decision,
                " → ".join(formatting.micros(us) for us in (p.baseline_us, p.candidate_us) if us is not None)
                or formatting.NONE,
                *_speedup_cells(p.speedup),
                p.code,
                p.path,
            )
            for p in self.points
        ]


def _speedup_cells(row: SpeedupRow | None) -> tuple[str, ...]:
    if row is None:
        return (formatting.NONE,) * 4
    return (
        formatting.speedup(row.speedup),
        formatting.interval(row.ci_low, row.ci_high),
        formatting.requirement(row.required),
        row.verdict,
    )


def histories(records: Sequence[tuple[str, Record | BenchRecord]], shape: str | None = None) -> list[History]:
    """The runs by kernel: equal task, format, target, device and variants.

    records: path and record. shape: the one shown; by default the one that decided most often, else the first timed.
    Runs without times are listed too; speedups that a run quotes from another one are not its own.
    """
    groups: dict[str, list[tuple[str, Record | BenchRecord]]] = {}
    for path, record in records:
        groups.setdefault(_title(record), []).append((path, record))
    return [_history(title, members, shape) for title, members in sorted(groups.items())]


def _title(record: Record | BenchRecord) -> str:
    variants = " → ".join(side.variant for _, side in record.sides())
    return f"{record.task}: {variants}, {record.format}, {record.arch} on {facts.device(record)}"


def _history(title: str, members: Sequence[tuple[str, Record | BenchRecord]], shape: str | None) -> History:
    timed = [(row.shape, row.cache) for _, record in members for _, side in record.sides() for row in side.timing]
    gated = [(r.shape, r.cache) for _, one in members if isinstance(one, Record) for r in one.speedups if r.gated]
    wanted = [cell for cell in (*gated, *timed) if shape in (None, cell[0])]
    decided = Counter(cell for cell in gated if cell in wanted)
    name, cache = (
        max(decided, key=lambda cell: (decided[cell], cell)) if decided else (wanted or [(shape or "", "warm")])[0]
    )
    points = sorted((_point(path, record, name, cache) for path, record in members), key=lambda point: point.created)
    return History(title, name, cache, tuple(points))


def _point(path: str, record: Record | BenchRecord, shape: str, cache: str) -> Point:
    sides = [side for _, side in record.sides()]
    times = [facts.p50_us(t for t in side.timing if (t.shape, t.cache) == (shape, cache)) for side in sides]
    found = record.speedups if isinstance(record, Record) else []
    builds = [build for build in sides[-1].builds if shape in build.shapes] or sides[-1].builds
    return Point(
        created=record.created,
        commit=facts.commit(record),
        decision=record.decision if isinstance(record, Record) else formatting.NONE,
        baseline_us=times[0] if len(times) > 1 else None,
        candidate_us=times[-1],
        speedup=next((row for row in found if (row.shape, row.cache) == (shape, cache)), None),
        code=_code_of(builds),
        path=path,
    )


def _code_of(builds: Sequence[Build]) -> str:
    """Return the hash of the machine code; of several kernels one over all of their hashes."""
    codes = list(dict.fromkeys(build.code_hash for build in builds if build.code_hash))
    if len(codes) > 1:
        return hashlib.sha256(" ".join(codes).encode()).hexdigest()[: len(codes[0])]
    return codes[0] if codes else formatting.NONE

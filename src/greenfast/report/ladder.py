"""The ladder of rungs as one Markdown table, for the README."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from greenfast.report import facts, format
from greenfast.spec.record import Record, SpeedupRow

_HEADER = (
    "rung",
    "format",
    "p50 µs",
    "speedup",
    "required",
    "registers / SMEM",
    "correctness",
    "verdict",
    "decision",
    "evidence",
)
_STALE = "stale"


def ladder_table(records: Sequence[tuple[str, Record]], *, stale: Collection[str] = (), shape: str = "mission") -> str:
    """A row per (path of the evidence file, record), in the order given; the path becomes the row's link.

    stale: paths of records whose kernel is not today's; they are shown as stale, without a number. shape: whose times
    and speedup are shown. Times are medians over seeds, baseline -> candidate.
    """
    rows = [_stale_row(path, record) if path in stale else _row(path, record, shape) for path, record in records]
    return format.table(_HEADER, rows, right=("p50 µs", "speedup", "required"))


def _stale_row(path: str, record: Record) -> list[str]:
    withheld = [format.NONE] * (len(_HEADER) - 5)
    return [record.candidate.variant, record.format, *withheld, _STALE, _STALE, _link(path, record)]


def _row(path: str, record: Record, shape: str) -> list[str]:
    speedup = _speedup_of(record, shape)
    resources = facts.worst_resources(record.candidate)
    return [
        record.candidate.variant,
        record.format,
        *(_speedup_cells(record, speedup) if speedup else ["PENDING"] * 3),
        f"{resources.registers} / {format.kilobytes(resources.smem_bytes)}" if resources else "PENDING",
        _correctness_cell(record),
        speedup.verdict if speedup else "PENDING",
        record.decision,
        _link(path, record),
    ]


def _speedup_of(record: Record, shape: str) -> SpeedupRow | None:
    """The shape's gated speedup, else its first."""
    rows = [row for row in record.speedups if row.shape == shape]
    return next((row for row in rows if row.gated), rows[0] if rows else None)


def _speedup_cells(record: Record, row: SpeedupRow) -> list[str]:
    times = [facts.p50_us(facts.timing_of(side, row)) for side in (record.baseline, record.candidate)]
    shown = [format.NONE if us is None else format.micros(us) for us in times]
    return [
        f"{shown[0]} -> {shown[1]} ({row.cache})",
        f"{format.speedup(row.speedup)} {format.interval(row.ci_low, row.ci_high)}",
        format.requirement(row.required),
    ]


def _correctness_cell(record: Record) -> str:
    if not (record.baseline.correctness or record.candidate.correctness):
        return record.gate_status("CORRECTNESS")
    before, after = facts.passed(record.baseline), facts.passed(record.candidate)
    counts = after if before == after else f"{after} (baseline {before})"
    return f"{counts} {record.gate_status('CORRECTNESS')}"


def _link(path: str, record: Record) -> str:
    return f"[{facts.commit(record)}, {facts.device(record)}]({path})"

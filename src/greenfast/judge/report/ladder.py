"""The ladder of rungs as Markdown for docs/results.md: tables of verdicts, and the console output of a run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import PurePath

from greenfast.judge.record_schema import Record, SpeedupRow
from greenfast.judge.report import facts, formatting
from greenfast.judge.report.facts import describe_source
from greenfast.spec.freshness import STALE, Freshness

_HEADER = (
    "rung",
    "against",
    "p50 µs",
    "speedup",
    "required",
    "registers / SMEM",
    "correctness",
    "verdict",
    "decision",
    "evidence",
)


def ladder_table(
    records: Sequence[tuple[str, Record]], *, aged: Mapping[str, Freshness] | None = None, shape: str | None = None
) -> str:
    """Return tables with one row per (path, record), in this order. The path becomes the row's link.

    Records of one task, format, target and device share a table. Its caption has these, the days and commits of the
    runs, and the shape. Records that were not timed at this shape get a separate table. Times are medians over seeds,
    baseline -> candidate.
    aged: by path, records that are stale or cannot be compared. Stale rows have no numbers. The reasons follow the
        table.
    shape: the shape of the table; by default the shape at which most records were gated.
    """
    groups: dict[tuple[str, ...], list[tuple[str, Record]]] = {}
    for path, record in records:
        groups.setdefault((record.task, record.format, record.arch, _machine(record)), []).append((path, record))
    tables = []
    for members in groups.values():
        while members:
            table_shape = _choose_shape([record for _, record in members]) if shape is None else shape
            parts: dict[bool, list[tuple[str, Record]]] = {True: [], False: []}
            for path, record in members:
                measured = {row.shape for row in facts.get_speedups(record)}
                parts[shape is not None or not measured or table_shape in measured].append((path, record))
            tables.append(_format_group(parts[True], aged or {}, table_shape))
            members = parts[False]
    return "\n\n".join(tables)


def _choose_shape(records: Sequence[Record]) -> str:
    counts = Counter(
        name for record in records for name in {row.shape for row in facts.get_speedups(record) if row.gated}
    )
    return max(counts, key=lambda name: (counts[name], name), default="")


def _format_group(records: Sequence[tuple[str, Record]], aged: Mapping[str, Freshness], shape: str) -> str:
    stale = {path for path, answer in aged.items() if answer.status == STALE}
    rows = [_stale_row(path, record) if path in stale else _row(path, record, shape) for path, record in records]
    table = formatting.table(_HEADER, rows, right=("p50 µs", "speedup", "required"))
    lines = [f"{_name(path)} is {aged[path]}" for path, _ in records if path in stale]
    lines += [
        f"cannot tell whether the kernels of {_name(path)} are today's: {'; '.join(aged[path].reasons)}"
        for path, _ in records
        if path in aged and path not in stale
    ]
    notes = f"\n\n{formatting.bullets(lines)}" if lines else ""
    return f"{_caption([record for _, record in records], shape)}\n\n{table}{notes}"


def _caption(records: Sequence[Record], shape: str) -> str:
    first = records[0]
    dims = next((row.dims for record in records for row in record.candidate.correctness if row.shape == shape), None)
    where = (
        f" Times and speedups are for shape {shape}{f' ({formatting.dims(dims)})' if dims else ''}." if shape else ""
    )
    days = sorted({record.created[:10] for record in records})
    span = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
    commits = list(dict.fromkeys(record.git.short for record in records))
    return (
        f"**{first.task}, {first.format}**, {first.arch} on {_machine(first)}; {span}; "
        f"commit{'s' if len(commits) > 1 else ''} {', '.join(commits)}.{where}"
    )


def _machine(record: Record) -> str:
    d = record.device
    if d is None or d.kind != "gpu":
        return facts.device(record)
    return f"{facts.device(record)} (driver {d.driver}, CUDA {d.cuda_version})"


def _stale_row(path: str, record: Record) -> list[str]:
    withheld = [formatting.NONE] * (len(_HEADER) - 5)
    return [record.candidate.variant, record.baseline.variant, *withheld, STALE, STALE, _link(path)]


def _row(path: str, record: Record, shape: str) -> list[str]:
    speedup = _find_speedup(record, shape)
    resources = facts.worst_resources(record.candidate)
    return [
        record.candidate.variant,
        record.baseline.variant,
        *(_speedup_cells(record, speedup) if speedup else ["PENDING"] * 3),
        f"{resources.registers} / {formatting.kilobytes(resources.smem_bytes)}" if resources else "PENDING",
        _correctness_cell(record),
        _verdict_cell(record, speedup),
        record.decision,
        _link(path),
    ]


def _find_speedup(record: Record, shape: str) -> SpeedupRow | None:
    rows = [row for row in facts.get_speedups(record) if row.shape == shape]
    return next((row for row in rows if row.gated), rows[0] if rows else None)


def _verdict_cell(record: Record, row: SpeedupRow | None) -> str:
    if row is None:
        return "PENDING"
    return f"{row.verdict}, {describe_source(record.quoted)}" if record.quoted else row.verdict


def _speedup_cells(record: Record, row: SpeedupRow) -> list[str]:
    times = [facts.p50_us(facts.select_timing(side, row)) for side in (record.baseline, record.candidate)]
    shown = [formatting.NONE if us is None else formatting.micros(us) for us in times]
    return [
        f"{shown[0]} -> {shown[1]} ({row.cache})",
        f"{formatting.speedup(row.speedup)} {formatting.interval(row.ci_low, row.ci_high)}",
        formatting.requirement(row.required),
    ]


def _correctness_cell(record: Record) -> str:
    if not (record.baseline.correctness or record.candidate.correctness):
        return record.gate_status("CORRECTNESS")
    before, after = facts.passed(record.baseline), facts.passed(record.candidate)
    counts = after if before == after else f"{after} (baseline {before})"
    return f"{counts} {record.gate_status('CORRECTNESS')}"


def _link(path: str) -> str:
    return f"[{_name(path)}]({path})"


def _name(path: str) -> str:
    parts = PurePath(path)
    name = parts.parent.name if parts.suffix == ".json" else parts.name
    return name or path

"""What the reports say about a record, before it is formatted: counts, worst cases, and what a gate said."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import median

from greenfast.judge.record_schema import CorrectnessRow, Run, Side, SpeedupRow, Status, TimingRow
from greenfast.spec.facts import Resources

#: In place of a cause that an earlier case of the same side shows.
SKIPPED = "not run, as an earlier case ended the process"


def row_status(row: CorrectnessRow) -> Status:
    """A row's status; PENDING where no gate has been applied to it."""
    if not row.gates:
        return "PENDING"
    return "PASS" if row.passed else "FAIL"


def passed(side: Side) -> str:
    """Correctness rows that passed, of all: "6/6"."""
    return f"{sum(row.passed for row in side.correctness)}/{len(side.correctness)}"


def side_status(side: Side) -> Status:
    """FAIL where a correctness row failed, else PENDING where one is missing or was not gated, else PASS."""
    found = {row_status(row) for row in side.correctness} or {"PENDING"}
    return "FAIL" if "FAIL" in found else "PENDING" if "PENDING" in found else "PASS"


def worst_resources(side: Side) -> Resources | None:
    """The largest of each resource over a side's kernels; None where nothing was built."""
    found = [build.resources for build in side.builds if build.resources is not None]
    if not found:
        return None
    largest = max(found, key=lambda r: r.smem_bytes)
    return Resources(
        registers=max(r.registers for r in found),
        static_smem_bytes=largest.static_smem_bytes,
        dynamic_smem_bytes=largest.dynamic_smem_bytes,
        stack_bytes=max(r.stack_bytes for r in found),
        spill_store_bytes=max(r.spill_store_bytes for r in found),
        spill_load_bytes=max(r.spill_load_bytes for r in found),
    )


def deciding_speedups(speedups: Sequence[SpeedupRow]) -> list[SpeedupRow]:
    """The speedups that the decision rests on; all of them where none is gated."""
    return [row for row in speedups if row.gated] or list(speedups)


def timing_of(side: Side, row: SpeedupRow) -> list[TimingRow]:
    """A side's timings behind a speedup, an entry per seed."""
    return [t for t in side.timing if (t.shape, t.cache) == (row.shape, row.cache)]


def p50_us(rows: Iterable[TimingRow]) -> float | None:
    """The median over seeds of the p50 in microseconds; None without timings."""
    values = [row.p50_us for row in rows]
    return median(values) if values else None


def gate_line(record: Run, gate: str) -> str:
    """A gate's status and why, such as "PENDING: no GPU"; also where it did not run."""
    for result in record.gates:
        if result.gate == gate:
            return f"{result.status}: {result.summary}"
    return f"PENDING: the {gate} gate did not run"


def commit(record: Run) -> str:
    """The commit that ran, shortened, marked where the tree was dirty."""
    sha = record.git.sha if record.git.sha == "unknown" else record.git.sha[:10]
    return f"{sha} (dirty)" if record.git.dirty else sha


def device(record: Run) -> str:
    """The device that ran, marked where it was emulated; "no device" for a run that only compiled."""
    if record.device is None:
        return "no device"
    return record.device.name if record.device.kind == "gpu" else f"{record.device.name} ({record.device.kind})"

"""Facts of a record for reports: counts, worst cases, gate results, and speedups, also cached ones, as Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from statistics import median

from greenfast.judge.record_schema import (
    Build,
    CachedTiming,
    CorrectnessRow,
    Record,
    Run,
    Side,
    SpeedupRow,
    Status,
    TimingRow,
)
from greenfast.judge.report import formatting
from greenfast.spec.facts import Resources
from greenfast.spec.problem import NORMAL

#: Text for a case that was skipped because an earlier case of the same implementation ended the process.
SKIPPED = "not run, as an earlier case ended the process"


def row_status(row: CorrectnessRow) -> Status:
    """Return a row's status; PENDING if it has no gates."""
    if not row.gates:
        return "PENDING"
    return "PASS" if row.passed else "FAIL"


def describe_inputs(row: CorrectnessRow) -> str:
    """Return the seed of a row, with marks for random cases and variants."""
    marks = [mark for mark, shown in (("drawn", row.drawn), (row.variant, row.variant != NORMAL)) if shown]
    return ", ".join([str(row.seed), *marks])


def passed(side: Side) -> str:
    """Return the number of passed correctness rows and of all rows, such as "6/6"."""
    return f"{sum(row.passed for row in side.correctness)}/{len(side.correctness)}"


def side_status(side: Side) -> Status:
    """Return FAIL if a correctness row failed, else PENDING if a row is missing or has no gates, else PASS."""
    statuses = {row_status(row) for row in side.correctness} or {"PENDING"}
    return "FAIL" if "FAIL" in statuses else "PENDING" if "PENDING" in statuses else "PASS"


def list_builds(record: Run) -> Iterator[tuple[str, str, Build]]:
    """Yield (role, variant, build) of every kernel."""
    for name, side in record.sides():
        for build in side.builds:
            yield name, side.variant, build


def worst_resources(side: Side) -> Resources | None:
    """Return the maximum of each resource over an implementation's kernels; None if nothing was compiled."""
    resources = [build.resources for build in side.builds if build.resources is not None]
    if not resources:
        return None
    largest = max(resources, key=lambda r: r.smem_bytes)
    return Resources(
        registers=max(r.registers for r in resources),
        static_smem_bytes=largest.static_smem_bytes,
        dynamic_smem_bytes=largest.dynamic_smem_bytes,
        stack_bytes=max(r.stack_bytes for r in resources),
        spill_store_bytes=max(r.spill_store_bytes for r in resources),
        spill_load_bytes=max(r.spill_load_bytes for r in resources),
    )


def get_speedups(record: Run) -> list[SpeedupRow]:
    """Return a comparison's speedups, or its cached ones if it could not time."""
    if not isinstance(record, Record):
        return []
    return record.quoted.speedups if record.quoted else record.speedups


def deciding_speedups(speedups: Sequence[SpeedupRow]) -> list[SpeedupRow]:
    """Return the gated speedups; all speedups if none is gated."""
    return [row for row in speedups if row.gated] or list(speedups)


def timing_of(side: Side, row: SpeedupRow) -> list[TimingRow]:
    """Return an implementation's timings for a speedup, one row per seed."""
    return [t for t in side.timing if (t.shape, t.cache) == (row.shape, row.cache)]


def p50_us(rows: Iterable[TimingRow]) -> float | None:
    """Return the median of the p50 over seeds, in microseconds; None without timings."""
    values = [row.p50_us for row in rows]
    return median(values) if values else None


def gate_line(record: Run, gate: str) -> str:
    """Return a gate's status and summary, such as "PENDING: no GPU"."""
    for result in record.gates:
        if result.gate == gate:
            return f"{result.status}: {result.summary}"
    return f"PENDING: the {gate} gate did not run"


def commit(record: Run) -> str:
    """Return the run's commit, shortened, with "(dirty)" for a modified tree."""
    sha = record.git.sha if record.git.sha == "unknown" else record.git.sha[:10]
    return f"{sha} (dirty)" if record.git.dirty else sha


def device(record: Run) -> str:
    """Return the device's name, with its kind if it is not a GPU; "no device" if the run only compiled."""
    if record.device is None:
        return "no device"
    return record.device.name if record.device.kind == "gpu" else f"{record.device.name} ({record.device.kind})"


def speedup_table(speedups: Sequence[SpeedupRow]) -> str:
    """A row per shape and cache state."""
    rows = [
        (
            row.shape,
            row.cache,
            formatting.speedup(row.speedup),
            f"{formatting.interval(row.ci_low, row.ci_high)} at {100 * row.confidence:g} %",
            formatting.percent(row.noise_floor),
            formatting.requirement(row.required),
            row.verdict,
            formatting.yes(row.gated),
            f"{row.blocks} in {row.processes}",
        )
        for row in speedups
    ]
    header = ("shape", "cache", "speedup", "interval", "noise floor", "required", "verdict", "gated")
    return formatting.table((*header, "blocks in processes"), rows, right=("speedup", "interval", "noise floor"))


def speedup_line(rows: Sequence[SpeedupRow]) -> str:
    """The speedups that decide, in one line."""
    return "; ".join(
        f"{row.shape} ({row.cache}) {formatting.speedup(row.speedup)} {formatting.interval(row.ci_low, row.ci_high)}, "
        f"required {formatting.requirement(row.required)}: {row.verdict}"
        for row in rows
    )


def describe_source(quote: CachedTiming) -> str:
    """Device, day and commit of what is quoted."""
    sha = quote.git.sha if quote.git.sha == "unknown" else quote.git.sha[:10]
    return f"quoted from {quote.device.name}, {quote.created[:10]}, commit {sha}{' (dirty)' if quote.git.dirty else ''}"


def cached_section(quote: CachedTiming) -> str:
    """The speedups of another run, under a heading that says so."""
    return (
        f"### Not measured in this run: {formatting.without_html(describe_source(quote))}\n\n"
        "Nothing was timed here. These are the speedups of a kept record of the same kernels (equal hashes, compiler "
        "and options), on the same inputs, with the verdicts against what is required here:\n\n"
        f"{speedup_table(quote.speedups)}\n\n"
        + formatting.table(
            ("quoted", "value"),
            [
                ("record", quote.path),
                ("SHA-256 of the record", quote.sha256),
                ("created", quote.created),
                ("device", f"{quote.device.name}, driver {quote.device.driver}, CUDA {quote.device.cuda_version}"),
                ("git", f"{quote.git.sha} on {quote.git.branch}, {'dirty' if quote.git.dirty else 'clean'}"),
                ("command", quote.command),
            ],
        )
    )

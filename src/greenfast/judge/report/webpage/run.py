"""The HTML page of a record: the claims first, the whole record last."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from markupsafe import Markup

from greenfast.judge.record_schema import (
    AnyRecord,
    Build,
    PhaseRecord,
    Record,
    Run,
    Side,
    SpeedupRow,
    largest_named_shape,
)
from greenfast.judge.report import facts, formatting
from greenfast.judge.report.counts import SHOWN
from greenfast.judge.report.formatting import Section
from greenfast.judge.report.markdown import list_sections
from greenfast.judge.report.plots import MAX_PANELS
from greenfast.judge.report.speedups import cached_section, describe_source, speedup_table
from greenfast.judge.report.webpage import charts, listing, roofline
from greenfast.judge.report.webpage.limits import limits
from greenfast.judge.report.webpage.listing import HotCode
from greenfast.judge.report.webpage.page import (
    bullets,
    code,
    figure,
    fold,
    markdown,
    page,
    paragraph,
    part,
    table,
)
from greenfast.judge.report.webpage.roofline import Work

_MAX_HASHES = 2


@dataclass(frozen=True)
class PageData:
    """Data of a page that is not in the record.

    work: the problem's minimum work by shape. code: the hotspots. sha256: hash of the record's file, or empty.
    """

    work: Mapping[str, Work] = field(default_factory=dict)
    code: HotCode = field(default_factory=HotCode)
    sha256: str = ""


def run_page(record: AnyRecord, data: PageData) -> str:
    """Return the page of a record."""
    word, claims = "", []
    if isinstance(record, Record):
        title = f"{record.task}: {record.baseline.variant} → {record.candidate.variant}"
        word, claims = str(record.decision), _claims(record)
    elif isinstance(record, PhaseRecord):
        title = f"{record.task}: phases of {record.side.variant}"
    else:
        title = f"{record.task}: {record.side.variant}"
        claims = [f"Speed: {facts.gate_line(record, 'PERFORMANCE')}", _correctness_claim(record)]
    parts = [
        *([Section("Gates", gates(record))] if record.gates else []),
        *_result_sections(record, data),
        Section("Repeat it", repeat(record)),
        Section("Limits", [bullets(limits(record))]),
        Section("The whole record", details(list_sections(record))),
    ]
    return page(title, parts, word=word, claims=claims, facts=identity(record, data.sha256))


def _result_sections(record: AnyRecord, data: PageData) -> list[Section]:
    if isinstance(record, PhaseRecord):
        return []
    is_comparison = isinstance(record, Record)
    return [
        *([Section("Speedups", _speedups(record))] if isinstance(record, Record) else []),
        Section("Roofline", roofline.section(record, data.work)),
        *(
            [Section("Counts", _counts(record))]
            if is_comparison or any(side.counts for _, side in record.sides())
            else []
        ),
        Section("Machine code", listing.section(data.code)),
        *([Section("Block medians", _blocks(record))] if isinstance(record, Record) else []),
        Section("Errors", _errors(record)),
    ]


def _claims(record: Record) -> list[str]:
    """Return the claims of a comparison: speedups with intervals, correctness, and the reasons against a merge."""
    rows = facts.deciding_speedups(get_speedups(record))
    claims = [f"Not measured in this run, {describe_source(record.quoted)}:"] if record.quoted else []
    for row in rows:
        requirement = f" ({formatting.requirement(row.required)} required)" if row.required else ""
        claims.append(
            f"{record.candidate.variant} is {row.speedup:.3f} times as fast as {record.baseline.variant}, "
            f"{formatting.interval(row.ci_low, row.ci_high)} at {100 * row.confidence:g} %, on {row.shape} with "
            f"{row.cache} L2: {row.verdict}{requirement}."
        )
    reasons = [] if record.decision == "MERGE" else record.reasons
    if not rows and not any(reason.startswith("PERFORMANCE") for reason in reasons):
        claims.append(f"Speed: {facts.gate_line(record, 'PERFORMANCE')}")
    return [*claims, _correctness_claim(record), *reasons]


def _correctness_claim(record: Run) -> str:
    return f"Correctness: {facts.gate_line(record, 'CORRECTNESS')}"


def identity(record: Run, sha256: str) -> list[tuple[str, str]]:
    """Return the device, date, target, commit and hashes of a record, as pairs of a name and a value."""
    d = record.device
    driver = f", driver {d.driver}, CUDA {d.cuda_version}" if d is not None and d.kind == "gpu" else ""
    pairs = [
        ("device", facts.device(record) + driver),
        ("date", record.created),
        ("target and format", f"{record.arch}, {record.format}"),
        ("commit", facts.commit(record)),
    ]
    for name, side in record.sides():
        hashes = list(
            dict.fromkeys(f"{b.kernel_hash} / {b.code_hash or formatting.NONE}" for b in _deciding(record, side))
        )
        if hashes:
            more = f" and {len(hashes) - _MAX_HASHES} more" if len(hashes) > _MAX_HASHES else ""
            pairs.append((f"{name}: source / machine code", ", ".join(hashes[:_MAX_HASHES]) + more))
    return [*pairs, *([("SHA-256 of the record", sha256)] if sha256 else [])]


def _deciding(record: Run, side: Side) -> list[Build]:
    """Return the kernels of the deciding shapes; all kernels if these are unknown."""
    shapes = {row.shape for row in facts.deciding_speedups(get_speedups(record))}
    return [build for build in side.builds if shapes.intersection(build.shapes)] or side.builds


def get_speedups(record: Run) -> list[SpeedupRow]:
    """Return a comparison's speedups, or its cached ones if it could not time."""
    if not isinstance(record, Record):
        return []
    return record.quoted.speedups if record.quoted else record.speedups


def gates(record: Run) -> list[Markup]:
    """Return the gates with their reasons, and all checks in a fold."""
    rows = [(gate.gate, *check) for gate in record.gates for check in gate.checks]
    parts = [part("gates", gates=record.gates)]
    if rows:
        parts.append(fold(f"all {len(rows)} checks", [table(("gate", "what", "target", "actual", "status"), rows)]))
    return parts


def details(sections: Sequence[Section]) -> list[Markup]:
    """Return the sections of a Markdown report, each in a fold."""
    return [fold(section.title, map(markdown, section.parts)) for section in sections]


def _speedups(record: Record) -> list[Markup]:
    rows = get_speedups(record)
    if not rows:
        return [paragraph(facts.gate_line(record, "PERFORMANCE"))]
    shown = figure(
        charts.speedups(rows),
        "A speedup is the baseline's time over the candidate's. The bar is its interval, the grey band around 1 is the "
        "noise floor (the speedup between identical kernels in this run), the green line is the requirement.",
    )
    if record.quoted:
        return [shown, markdown(cached_section(record.quoted))]
    return [shown, markdown(speedup_table(rows)), fold("all timings", [_timings(record)])]


def _timings(record: Run) -> Markup:
    header = ("side", "shape", "seed", "L2", "p50 µs", "p90 µs", "mean µs", "std µs", "launches")
    rows = [
        (
            *(name, row.shape, str(row.seed), row.cache),
            *(formatting.micros(us) for us in (row.p50_us, row.p90_us, row.mean_us, row.std_us)),
            str(row.timed_iters),
        )
        for name, side in record.sides()
        for row in side.timing
    ]
    return table(header, rows, right=header[4:])


def _counts(record: Run) -> list[Markup]:
    """Return the counts at the task's largest shape. The whole record below has the other shapes."""
    sides = record.sides()
    counted = {shape: c for _, side in sides for shape, c in side.counts.items()}
    if not counted:
        return [paragraph("Not counted: the emulator counts what a kernel executes, and these kernels ran elsewhere.")]
    shape = largest_named_shape(counted)
    by_role = {role: side.counts[shape] for role, side in sides if shape in side.counts}
    least = record.least_work.get(shape, {})
    rows, ratios = [], []
    for key, title in SHOWN.items():
        values = [getattr(counts, key) for counts in by_role.values()]
        ratio = values[-1] / values[0] if len(values) > 1 and values[0] else None
        if ratio:
            ratios.append((title, ratio))
        times = [formatting.NONE if ratio is None else f"{ratio:.2f}x"] if len(by_role) > 1 else []
        least_cell = f"{values[-1] / least[key]:.2f}x" if least.get(key) else formatting.NONE
        rows.append((title, *(f"{value:,}" for value in values), *times, least_cell))
    header = ("count", *by_role, *(["ratio"] if len(by_role) > 1 else []), f"{list(by_role)[-1]} / least")
    lead = f"What one launch at {shape} executes, counted in PTX by the emulator; least: what the problem needs."
    parts = [paragraph(lead)]
    if ratios:
        parts.append(figure(charts.counts(ratios), "Left of the line the candidate does less than the baseline."))
    return [*parts, table(header, rows, right=header[1:])]


def _blocks(record: Record) -> list[Markup]:
    rows = facts.deciding_speedups(record.speedups)
    if not rows or not any(row.block_medians_us for _, side in record.sides() for row in side.timing):
        return [paragraph("No blocks were timed in this run.")]
    shown = ", ".join(f"{row.shape} ({row.cache})" for row in rows[:MAX_PANELS])
    caption = (
        "One mark per block of launches, in the order of the run; the marks of a column are one interleaved pair: "
    )
    caption += shown
    if len(rows) > MAX_PANELS:
        caption += f", the first {MAX_PANELS} of {len(rows)}"
    return [figure(charts.blocks(record), f"{caption}."), paragraph(_clocks(record))]


_CLOCKS = (("sm_mhz", "SM clock", "MHz"), ("temperature_c", "temperature", "°C"), ("watts", "power", "W"))


def _clocks(record: Record) -> str:
    """Describe clocks and power per implementation, or over the whole run if blocks were not sampled."""
    parts = []
    for name, values, unit in (("SM clock", "block_mhz", "MHz"), ("power", "block_watts", "W")):
        for role, side in record.sides():
            samples = [value for row in side.timing for process in getattr(row, values) for value in process]
            if samples:
                low, high, middle = min(samples), max(samples), median(samples)
                parts.append(f"{role} {name} {low:.0f} to {high:.0f} {unit}, median {middle:.0f}")
    if parts:
        return f"While blocks ran: {'; '.join(parts)}."
    ranges = [
        f"{name} {record.clocks[f'{key}_min']:.0f} to {record.clocks[f'{key}_max']:.0f} {unit}"
        for key, name, unit in _CLOCKS
        if {f"{key}_min", f"{key}_max"} <= record.clocks.keys()
    ]
    if not ranges:
        return "The driver told neither clocks nor power."
    return f"Over the whole run: {', '.join(ranges)}. This record has no clock or power of each block."


def _errors(record: Run) -> list[Markup]:
    rows = [(name, row) for name, side in record.sides() for row in side.correctness]
    if not any(row.bound_ratio is not None for _, row in rows):
        return [paragraph(facts.gate_line(record, "CORRECTNESS"))]
    caption = (
        "Kernel error: against exact arithmetic on the same inputs. What rounding explains is the bound that the "
        "problem derives for each element; 1 is the limit."
    )
    if not any(row.bound_histogram for _, row in rows):
        caption += " This record has the worst elements only, no distributions."
    header = ("side", "shape", "seeds", "worst / bound", "kernel error", "format error", "largest error", "status")
    cells = []
    for name, shape in dict.fromkeys((name, row.shape) for name, row in rows):
        group = [row for role, row in rows if (role, row.shape) == (name, shape)]
        statuses = {facts.row_status(row) for row in group}
        kernel_errors = [row.kernel_error.relative_error if row.kernel_error else None for row in group]
        cells.append(
            (
                name,
                shape,
                str(len(group)),
                formatting.error(_largest(row.bound_ratio for row in group)),
                formatting.error(_largest(kernel_errors)),
                formatting.error(_largest(row.format_error.relative_error for row in group)),
                formatting.error(_largest(row.error.max_abs_err if row.error else None for row in group)),
                next(status for status in ("FAIL", "PENDING", "PASS") if status in statuses),
            )
        )
    note = (
        "Kernel and format error are relative (Frobenius); the format error is of exact arithmetic on the quantized "
        "inputs, which no kernel can better. Each column is the worst of the seeds."
    )
    return [figure(charts.errors(rows), caption), table(header, cells, right=header[2:7]), paragraph(note)]


def _largest(values: Iterable[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)


def repeat(record: Run) -> list[Markup]:
    """Return the command, the versions and the seeds for repeating a run."""
    versions = ", ".join(f"{name} {version}" for name, version in sorted(record.environment.items()))
    text = f"With greenfast {record.package_version} at commit {record.git.sha}{' (dirty)' if record.git.dirty else ''}"
    seeds = sorted({row.seed for _, side in record.sides() for row in side.correctness})
    return [
        code(record.command),
        paragraph(f"{text}{f'; {versions}' if versions else ''}."),
        *([paragraph(f"Seeds of the inputs: {', '.join(map(str, seeds))}.")] if seeds else []),
    ]

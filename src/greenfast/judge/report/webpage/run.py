"""A record of the gates as a page: what it claims first, everything that it holds last."""

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
from greenfast.judge.report.markdown import sections
from greenfast.judge.report.plots import MAX_PANELS
from greenfast.judge.report.speedups import quoted_from, quoted_section, speedup_table
from greenfast.judge.report.webpage import charts, listing, roofline
from greenfast.judge.report.webpage.limits import limits
from greenfast.judge.report.webpage.listing import HotCode
from greenfast.judge.report.webpage.page import (
    Section,
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
class Found:
    """What a page shows and a record does not hold.

    work: by shape. code: the hottest stretches. sha256: of the record's file, empty where there is none.
    """

    work: Mapping[str, Work] = field(default_factory=dict)
    code: HotCode = field(default_factory=HotCode)
    sha256: str = ""


def run_page(record: AnyRecord, found: Found) -> str:
    """The page of a record."""
    word, said = "", []
    if isinstance(record, Record):
        title = f"{record.task}: {record.baseline.variant} → {record.candidate.variant}"
        word, said = str(record.decision), _claims(record)
    elif isinstance(record, PhaseRecord):
        title = f"{record.task}: phases of {record.side.variant}"
    else:
        title = f"{record.task}: {record.side.variant}"
        said = [f"Speed: {facts.gate_line(record, 'PERFORMANCE')}", _correct(record)]
    parts = [
        *([Section("Gates", gates(record))] if record.gates else []),
        *_measured(record, found),
        Section("Repeat it", repeat(record)),
        Section("Limits", [bullets(limits(record))]),
        Section("The whole record", details(sections(record))),
    ]
    return page(title, parts, word=word, claims=said, facts=identity(record, found.sha256))


def _measured(record: AnyRecord, found: Found) -> list[Section]:
    if isinstance(record, PhaseRecord):
        return []
    two = isinstance(record, Record)
    return [
        *([Section("Speedups", _speedups(record))] if isinstance(record, Record) else []),
        Section("Roofline", roofline.section(record, found.work)),
        *([Section("Counts", _counts(record))] if two or any(side.counts for _, side in record.sides()) else []),
        Section("Machine code", listing.section(found.code)),
        *([Section("Block medians", _blocks(record))] if isinstance(record, Record) else []),
        Section("Errors", _errors(record)),
    ]


def _claims(record: Record) -> list[str]:
    """What the run says of speed, with interval, of correctness, and why it was not merged."""
    rows = facts.deciding_speedups(speedups_of(record))
    said = [f"Not measured in this run, {quoted_from(record.quoted)}:"] if record.quoted else []
    for row in rows:
        asked = f" ({formatting.requirement(row.required)} required)" if row.required else ""
        said.append(
            f"{record.candidate.variant} is {row.speedup:.3f} times as fast as {record.baseline.variant}, "
            f"{formatting.interval(row.ci_low, row.ci_high)} at {100 * row.confidence:g} %, on {row.shape} with "
            f"{row.cache} L2: {row.verdict}{asked}."
        )
    why = [] if record.decision == "MERGE" else record.reasons
    if not rows and not any(reason.startswith("PERFORMANCE") for reason in why):
        said.append(f"Speed: {facts.gate_line(record, 'PERFORMANCE')}")
    return [*said, _correct(record), *why]


def _correct(record: Run) -> str:
    return f"Correctness: {facts.gate_line(record, 'CORRECTNESS')}"


def identity(record: Run, sha256: str) -> list[tuple[str, str]]:
    """Where, when and of what a record is."""
    d = record.device
    driver = f", driver {d.driver}, CUDA {d.cuda_version}" if d is not None and d.kind == "gpu" else ""
    found = [
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
            found.append((f"{name}: source / machine code", ", ".join(hashes[:_MAX_HASHES]) + more))
    return [*found, *([("SHA-256 of the record", sha256)] if sha256 else [])]


def _deciding(record: Run, side: Side) -> list[Build]:
    """The kernels of the shapes that decide; all of them where none does, or a record does not say."""
    wanted = {row.shape for row in facts.deciding_speedups(speedups_of(record))}
    return [build for build in side.builds if wanted.intersection(build.shapes)] or side.builds


def speedups_of(record: Run) -> list[SpeedupRow]:
    """A comparison's speedups, or those that it quotes."""
    if not isinstance(record, Record):
        return []
    return record.quoted.speedups if record.quoted else record.speedups


def gates(record: Run) -> list[Markup]:
    """Each gate with its reasons, and every check on demand."""
    rows = [(gate.gate, *check) for gate in record.gates for check in gate.checks]
    parts = [part("gates", gates=record.gates)]
    if rows:
        parts.append(fold(f"all {len(rows)} checks", [table(("gate", "what", "target", "actual", "status"), rows)]))
    return parts


def details(parts: Sequence[tuple[str, str]]) -> list[Markup]:
    """Sections of a Markdown report, each on demand."""
    return [fold(name, [markdown(text)]) for name, text in parts]


def _speedups(record: Record) -> list[Markup]:
    rows = speedups_of(record)
    if not rows:
        return [paragraph(facts.gate_line(record, "PERFORMANCE"))]
    shown = figure(
        charts.speedups(rows),
        "A speedup is the baseline's time over the candidate's; the bar is its interval, the grey band around 1 the "
        "noise floor (what this run reports between identical kernels), the green line what is required.",
    )
    if record.quoted:
        return [shown, markdown(quoted_section(record.quoted))]
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
    """The counts on the task's shape where most is executed; those of the others stand with the whole record."""
    sides = record.sides()
    counted = {shape: c for _, side in sides for shape, c in side.counts.items()}
    if not counted:
        return [paragraph("Not counted: the emulator counts what a kernel executes, and these kernels ran elsewhere.")]
    shape = largest_named_shape(counted)
    found = {role: side.counts[shape] for role, side in sides if shape in side.counts}
    least = record.least_work.get(shape, {})
    rows, ratios = [], []
    for key, title in SHOWN.items():
        values = [getattr(counts, key) for counts in found.values()]
        ratio = values[-1] / values[0] if len(values) > 1 and values[0] else None
        if ratio:
            ratios.append((title, ratio))
        times = [formatting.NONE if ratio is None else f"{ratio:.2f}x"] if len(found) > 1 else []
        least_cell = f"{values[-1] / least[key]:.2f}x" if least.get(key) else formatting.NONE
        rows.append((title, *(f"{value:,}" for value in values), *times, least_cell))
    header = ("count", *found, *(["ratio"] if len(found) > 1 else []), f"{list(found)[-1]} / least")
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
    """Clocks and power: of each side's blocks where they were sampled, else over the whole run."""
    said = []
    for name, values, unit in (("SM clock", "block_mhz", "MHz"), ("power", "block_watts", "W")):
        for role, side in record.sides():
            found = [value for row in side.timing for process in getattr(row, values) for value in process]
            if found:
                said.append(f"{role} {name} {min(found):.0f} to {max(found):.0f} {unit}, median {median(found):.0f}")
    if said:
        return f"While blocks ran: {'; '.join(said)}."
    seen = [
        f"{name} {record.clocks[f'{key}_min']:.0f} to {record.clocks[f'{key}_max']:.0f} {unit}"
        for key, name, unit in _CLOCKS
        if {f"{key}_min", f"{key}_max"} <= record.clocks.keys()
    ]
    if not seen:
        return "The driver told neither clocks nor power."
    return f"Over the whole run: {', '.join(seen)}. This record has no clock or power of each block."


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
        of = [row for role, row in rows if (role, row.shape) == (name, shape)]
        held = {facts.row_status(row) for row in of}
        cells.append(
            (
                name,
                shape,
                str(len(of)),
                formatting.error(_largest(row.bound_ratio for row in of)),
                formatting.error(_largest(row.kernel_error.relative_error if row.kernel_error else None for row in of)),
                formatting.error(_largest(row.format_error.relative_error for row in of)),
                formatting.error(_largest(row.error.max_abs_err if row.error else None for row in of)),
                next(status for status in ("FAIL", "PENDING", "PASS") if status in held),
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
    """The command, the versions and the seeds that repeat a run."""
    versions = ", ".join(f"{name} {version}" for name, version in sorted(record.environment.items()))
    said = f"With greenfast {record.package_version} at commit {record.git.sha}{' (dirty)' if record.git.dirty else ''}"
    seeds = sorted({row.seed for _, side in record.sides() for row in side.correctness})
    return [
        code(record.command),
        paragraph(f"{said}{f'; {versions}' if versions else ''}."),
        *([paragraph(f"Seeds of the inputs: {', '.join(map(str, seeds))}.")] if seeds else []),
    ]

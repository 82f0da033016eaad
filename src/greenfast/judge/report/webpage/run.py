"""The HTML page of a record: the claims first, the whole record last."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import median

from markupsafe import Markup

from greenfast.judge.record_schema import AnyRecord, Build, PhaseRecord, Record, Run, Side, largest_named_shape
from greenfast.judge.report import facts, formatting, plots
from greenfast.judge.report.facts import SHOWN, cached_section, counts_section, describe_source, speedup_table
from greenfast.judge.report.formatting import Section
from greenfast.judge.report.markdown import list_sections
from greenfast.judge.report.plots import MAX_PANELS
from greenfast.judge.report.webpage import listing, roofline
from greenfast.judge.report.webpage.listing import HotCode
from greenfast.judge.report.webpage.page import bullets, code, figure, fold, markdown, page, paragraph, part, table
from greenfast.judge.report.webpage.roofline import Work

_MAX_HASHES = 2


def run_page(
    record: AnyRecord, *, work: Mapping[str, Work] | None = None, code: HotCode | None = None, sha256: str = ""
) -> str:
    """Return the page of a record.

    work: the problem's minimum work by shape. code: the hotspots. sha256: hash of the record's file, or empty.
    """
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
        *_result_sections(record, work or {}, code or HotCode()),
        Section("Repeat it", repeat(record)),
        Section("Limits", [bullets(limits(record))]),
        Section("The whole record", details(list_sections(record))),
    ]
    return page(title, parts, word=word, claims=claims, facts=identity(record, sha256))


def _result_sections(record: AnyRecord, work: Mapping[str, Work], code: HotCode) -> list[Section]:
    if isinstance(record, PhaseRecord):
        return []
    is_comparison = isinstance(record, Record)
    return [
        *([Section("Speedups", _speedups(record))] if isinstance(record, Record) else []),
        Section("Roofline", roofline.section(record, work)),
        *(
            [Section("Counts", _counts(record))]
            if is_comparison or any(side.counts for _, side in record.sides())
            else []
        ),
        Section("Machine code", listing.section(code)),
        *([Section("Block medians", _blocks(record))] if isinstance(record, Record) else []),
        Section("Errors", [*_error_map(record), *_errors(record)]),
    ]


def _claims(record: Record) -> list[str]:
    rows = facts.deciding_speedups(facts.get_speedups(record))
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
        ("commit of greenfast", record.git.short),
    ]
    for name, side in record.sides():
        if side.solution is not None and side.solution.commit:
            sha, *dirty = side.solution.commit.split(" ", 1)
            pairs.append((f"{name}: commit", " ".join([sha[:10], *dirty])))
        hashes = list(
            dict.fromkeys(f"{b.kernel_hash} / {b.code_hash or formatting.NONE}" for b in _deciding(record, side))
        )
        if hashes:
            more = f" and {len(hashes) - _MAX_HASHES} more" if len(hashes) > _MAX_HASHES else ""
            pairs.append((f"{name}: source / machine code", ", ".join(hashes[:_MAX_HASHES]) + more))
    return [*pairs, *([("SHA-256 of the record", sha256)] if sha256 else [])]


def _deciding(record: Run, side: Side) -> list[Build]:
    shapes = {row.shape for row in facts.deciding_speedups(facts.get_speedups(record))}
    return [build for build in side.builds if shapes.intersection(build.shapes)] or side.builds


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
    rows = facts.get_speedups(record)
    if not rows:
        return [paragraph(facts.gate_line(record, "PERFORMANCE"))]
    shown = figure(
        plots.draw_speedups(rows),
        "A speedup is the baseline's time over the candidate's. The bar is its interval, the grey band around 1 is the "
        "noise floor (the speedup between identical kernels in this run), the green line is the requirement.",
    )
    if record.quoted:
        return [shown, markdown(cached_section(record.quoted))]
    return [shown, markdown(speedup_table(rows))]


def _counts(record: Run) -> list[Markup]:
    sides = record.sides()
    counted = {shape: c for _, side in sides for shape, c in side.counts.items()}
    if not counted:
        return [paragraph("Not counted: only the emulator counts instructions, and the kernels ran elsewhere.")]
    shape = largest_named_shape(counted)
    first, *_, last = [side.counts.get(shape) for _, side in (*sides, sides[-1])]
    ratios = [
        (title, getattr(last, key) / getattr(first, key))
        for key, title in SHOWN.items()
        if first is not last and first and last and getattr(first, key) and getattr(last, key)
    ]
    caption = f"One launch at {shape}. Left of the line the candidate does less than the baseline."
    drawn = [figure(plots.draw_counts(ratios), caption)] if ratios else []
    return [*drawn, markdown(counts_section(sides, record.least_work))]


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
    return [figure(plots.draw_medians(record), f"{caption}."), paragraph(_clocks(record))]


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
        return "The driver reported neither clocks nor power."
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
    return [figure(plots.draw_errors(rows), caption)]


def _error_map(record: Run) -> list[Markup]:
    """Show where the output of the first wrong case is wrong, the task's own shapes first."""
    wrong = [(name, row) for name, side in record.sides() for row in side.correctness if row.error_map]
    wrong.sort(key=lambda pair: pair[1].drawn)
    if not wrong:
        return []
    name, row = wrong[0]
    found = row.error_map
    assert found is not None
    caption = (
        f"{name}, {row.shape}, seed {row.seed}: {found.output} as {found.rows} rows and {found.columns} columns. The "
        "colour of a cell is its largest error over the allowed error."
    )
    columns = [str(found.left + n) for n in range(len(found.got[0]))]
    rows = [
        (str(found.top + n), *(_compare_values(a, b) for a, b in zip(got, expected, strict=True)))
        for n, (got, expected) in enumerate(zip(found.got, found.expected, strict=True))
    ]
    around = "The values around the worst element, and in brackets the expected ones; row and column are indices:"
    return [
        paragraph(f"The worst element: {row.worst}."),
        figure(plots.draw_error_map(found), caption),
        paragraph(around),
        table(("row", *columns), rows, right=columns),
    ]


def _compare_values(got: float | None, expected: float | None) -> str:
    """Return a value, and the expected one if it has other digits."""
    shown, right = ("not finite" if value is None else f"{value:.5g}" for value in (got, expected))
    return shown if shown == right else f"{shown} ({right})"


def repeat(record: Run) -> list[Markup]:
    """Return the command, the versions and the seeds for repeating a run."""
    versions = ", ".join(f"{name} {version}" for name, version in sorted(record.environment.items()))
    text = f"With greenfast {record.package_version} at commit {record.git}"
    seeds = sorted({row.seed for _, side in record.sides() for row in side.correctness})
    return [
        code(record.command),
        paragraph(f"{text}{f'; {versions}' if versions else ''}."),
        *([paragraph(f"Seeds of the inputs: {', '.join(map(str, seeds))}.")] if seeds else []),
    ]


def limits(record: Run) -> list[str]:
    """Return one sentence per limit, the most important first."""
    has_counts = any(side.counts for _, side in record.sides())
    return [
        *_describe_source(record),
        *_describe_correctness(record),
        *_describe_timing(record),
        *(["Counts are of PTX, from which the assembler makes other machine code."] if has_counts else []),
        "A file can be edited: the proof is to run the command above again, not this page.",
    ]


def _describe_source(record: Run) -> Iterator[str]:
    if record.git.dirty:
        yield (
            f"The source tree had changes that are not in commit {record.git.sha[:10]}: the hashes above identify the "
            "kernels, the commit does not."
        )
    for gate in record.gates:
        if gate.status == "PENDING":
            yield f"{gate.gate} was not decided: {gate.summary}"
        for check, _, actual, status in gate.checks:
            if status == "PENDING":
                yield f"{gate.gate}, not asked: {check} ({actual})"


def _describe_correctness(record: Run) -> Iterator[str]:
    rows = [row for _, side in record.sides() for row in side.correctness]
    if not rows:
        return
    shapes, seeds = {row.shape for row in rows}, {row.seed for row in rows}
    yield (
        f"Correct means: on {len(shapes)} shape{'s'[: len(shapes) > 1]} and {len(seeds)} "
        f"seed{'s'[: len(seeds) > 1]} of the problem's inputs. Other shapes and inputs were not run."
    )
    if isinstance(record, Record) and record.parity:
        same = sum(row.identical for row in record.parity)
        if same < len(record.parity):
            yield (
                f"The two sides' outputs have equal bits on {same} of {len(record.parity)} inputs; elsewhere each is "
                "held to the bounds alone."
            )


def _describe_timing(record: Run) -> Iterator[str]:
    if isinstance(record, PhaseRecord):
        return
    if isinstance(record, Record) and record.quoted is not None:
        yield (
            f"No time was measured in this run. The speedups are another run's, on {record.quoted.device.name}, of "
            "kernels with equal hashes."
        )
        return
    rows = [row for _, side in record.sides() for row in side.timing]
    if not rows:
        yield "Nothing was timed: this page makes no claim about speed."
        return
    yield f"Times are of one {facts.device(record)}; another device, driver or clock gives others."
    if isinstance(record, Record):
        yield from _describe_speedups(record)
    discarded = sum(row.discarded_iters for row in rows)
    if discarded:
        yield f"{discarded} launches were discarded because the clock had fallen."
    if not any(row.block_mhz for row in rows):
        yield "Clocks and power were not sampled for each block, so a side that ran on a slower clock would not show."


def _describe_speedups(record: Record) -> Iterator[str]:
    gated = [row for row in record.speedups if row.gated]
    others = len(record.speedups) - len(gated)
    if gated and others:
        names = ", ".join(f"{row.shape} ({row.cache})" for row in gated)
        chance = formatting.percent(1 - record.speedups[0].confidence)
        yield (
            f"Only {names} decided. The other {others} speedups are shown and were not asked for; each interval misses "
            f"the true value with a chance of {chance}."
        )
    fewest = min((row.processes for row in record.speedups), default=0)
    if 0 < fewest < 3:
        yield f"Processes timed: {fewest}. So few cannot show how processes differ, and the interval is of them alone."

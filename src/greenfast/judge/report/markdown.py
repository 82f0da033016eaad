"""Conversion of a record to Markdown: the full report, and a short form for a pull request."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from greenfast.judge.record_schema import (
    AnyRecord,
    BenchRecord,
    Build,
    CorrectnessRow,
    PhaseRecord,
    Record,
    Run,
)
from greenfast.judge.report import facts, formatting
from greenfast.judge.report.counts import PHASE_HEADER, counts_section, phase_rows
from greenfast.judge.report.speedups import cached_section, describe_source, speedup_line, speedup_table
from greenfast.spec.facts import Resources
from greenfast.spec.printable import printable
from greenfast.spec.problem import NORMAL

_SHORT_REASONS = 2
_SHORT_CHARACTERS = 600


def validation_report(record: Record, *, plot: str | None = None) -> str:
    """Return the full report of a comparison. plot: path of a figure of this record, relative to the report."""
    title = f"# {record.task}: {record.baseline.variant} -> {record.candidate.variant}, {record.decision}"
    body = [f"## {name}\n\n{text}" for name, text in _validation_sections(record, plot)]
    return printable("\n\n".join([formatting.without_html(title), formatting.bullets(_headline(record)), *body]) + "\n")


def report(record: AnyRecord, *, plot: str | None = None) -> str:
    """Return the full report of any record. plot: as for ``validation_report``."""
    if isinstance(record, Record):
        return validation_report(record, plot=plot)
    return bench_report(record) if isinstance(record, BenchRecord) else phase_report(record)


def sections(record: AnyRecord) -> list[tuple[str, str]]:
    """Return the names and texts of the report's sections."""
    if isinstance(record, Record):
        return _validation_sections(record, None)
    return _bench_sections(record) if isinstance(record, BenchRecord) else _phase_sections(record)


def _validation_sections(record: Record, plot: str | None) -> list[tuple[str, str]]:
    return [
        ("Gates", gates(record)),
        ("Correctness", _correctness(record)),
        ("Parity of the two sides", _parity(record)),
        ("Performance", _performance(record, plot)),
        ("Compiler resources", resources(record)),
        ("Evidence", _evidence(record)),
        ("Decision", _decision(record)),
        *provenance(record),
    ]


def phase_report(record: PhaseRecord) -> str:
    """Return the report of the phases of an instrumented build."""
    return document(f"{record.task}: phases of {record.side.variant}", _phase_sections(record))


def _phase_sections(record: PhaseRecord) -> list[tuple[str, str]]:
    rows = [
        (shape, phase, f"{count:.0f}", formatting.percent(count / sum(cycles.values())))
        for shape, cycles in record.phase_cycles.items()
        for phase, count in cycles.items()
    ]
    tables = [
        f"{formatting.without_html(shape)}, `emulated`:\n\n"
        + formatting.table(PHASE_HEADER, phase_rows(counts), right=PHASE_HEADER[1:])
        for shape, counts in record.phase_counts.items()
    ]
    if rows:
        header = ("shape", "phase", "cycles per block", "share")
        tables.append(formatting.table(header, rows, right=("cycles per block", "share")))
    return [("Phases", "\n\n".join(tables)), *provenance(record)]


def document(title: str, sections: Sequence[tuple[str, str]]) -> str:
    """Return a document with a title and named sections."""
    body = [f"## {name}\n\n{text}" for name, text in sections]
    return printable("\n\n".join([formatting.without_html(f"# {title}"), *body]) + "\n")


def bench_report(record: BenchRecord) -> str:
    """Return the report of one implementation that was checked and timed alone."""
    return document(f"{record.task}: {record.side.variant}", _bench_sections(record))


def _bench_sections(record: BenchRecord) -> list[tuple[str, str]]:
    counted = counts_section(record.sides(), record.least_work)
    return [
        ("Gates", gates(record)),
        ("Correctness", _correctness(record)),
        ("Timing", "\n\n".join(_timings(record)) or formatting.without_html(facts.gate_line(record, "PERFORMANCE"))),
        ("Compiler resources", resources(record)),
        *([("Counts", counted)] if counted else []),
        *provenance(record),
    ]


def short_form(record: Record) -> str:
    """Return at most 15 lines for a pull request: decision, headline, gates, reasons, device and command."""
    shown = [
        formatting.literal(formatting.short(formatting.one_line(reason), _SHORT_CHARACTERS))
        for reason in record.reasons[:_SHORT_REASONS]
    ]
    if len(record.reasons) > _SHORT_REASONS:
        shown.append(f"and {len(record.reasons) - _SHORT_REASONS} more")
    lines = [
        *_headline(record),
        "Gates: " + (", ".join(f"{g.gate} {g.status}" for g in record.gates) or "PENDING: none ran"),
        "Why: " + ("; ".join(shown) or "no reason recorded"),
        f"Device: {facts.device(record)}; commit {facts.commit(record)}; {record.created}",
        f"Reproduce: {formatting.code(record.command)}",
    ]
    sides = f"{formatting.code(record.baseline.variant)} -> {formatting.code(record.candidate.variant)}"
    title = f"**{record.decision}**: {record.task}, {sides}, {record.format}, {record.arch}"
    return f"{formatting.without_html(title)}\n\n{formatting.bullets(lines)}\n"


def _headline(record: Record) -> list[str]:
    """Return the three summary lines: correctness, performance, resources."""
    return [
        f"**Correctness**: {_correctness_line(record)}",
        f"**Performance**: {_performance_line(record)}",
        f"**Resources**: {_resources_line(record)}",
    ]


def _correctness_line(record: Record) -> str:
    sides = (record.baseline, record.candidate)
    gate = record.gate_status("CORRECTNESS")
    if not any(side.correctness for side in sides):
        return facts.gate_line(record, "CORRECTNESS")
    counts = [f"{facts.passed(side)} {facts.side_status(side)}" for side in sides]
    text = f"{counts[0]} both sides" if counts[0] == counts[1] else f"baseline {counts[0]}, candidate {counts[1]}"
    # The gate has checks beyond the rows, such as the emulator's.
    agrees = all(facts.side_status(side) == gate for side in sides)
    return text if agrees else f"{text}; gate {facts.gate_line(record, 'CORRECTNESS')}"


def _performance_line(record: Record) -> str:
    if record.quoted is not None:
        rows = facts.deciding_speedups(record.quoted.speedups)
        return f"not measured here, {describe_source(record.quoted)}: {speedup_line(rows)}"
    rows = facts.deciding_speedups(record.speedups)
    return speedup_line(rows) or facts.gate_line(record, "PERFORMANCE")


def _resources_line(record: Record) -> str:
    def line(resources: Resources | None) -> str:
        if resources is None:
            return facts.gate_line(record, "BUILD")
        smem = formatting.kilobytes(resources.smem_bytes)
        return f"{resources.registers} registers, {smem} SMEM, {resources.spill_bytes} bytes spilled"

    before, after = facts.worst_resources(record.baseline), facts.worst_resources(record.candidate)
    if before is None and after is None:
        return line(None)
    return f"{line(after)} (baseline: {line(before)})"


def gates(record: Run) -> str:
    """Return the checks of all gates as a table, and a list of the gates with their summaries and reasons."""
    if not record.gates:
        return "PENDING: no gate ran"
    rows = [
        (gate.gate, check, target, actual, status)
        for gate in record.gates
        for check, target, actual, status in gate.checks
        or [(gate.summary, formatting.NONE, formatting.NONE, gate.status)]
    ]
    lines = [f"**{gate.gate}** {gate.status}: {'; '.join([gate.summary, *gate.reasons])}" for gate in record.gates]
    return formatting.table(("gate", "what", "target", "actual", "status"), rows) + "\n\n" + formatting.bullets(lines)


def _correctness(record: Run) -> str:
    rows = [_correctness_cells(name, row) for name, side in record.sides() for row in side.correctness]
    if not rows:
        return formatting.without_html(facts.gate_line(record, "CORRECTNESS"))
    numbers = ("max", "mean", "bad %", "format max", "format mean", "kernel relative", "kernel / bound")
    text = formatting.table(("side", "shape", "seed", *numbers, "status", "failed, notes"), rows, right=numbers)
    return (
        f"{text}\n\nmax, mean and bad % are absolute errors against the unquantized reference; format errors are "
        "of exact arithmetic on the dequantized inputs, which no kernel can better; kernel errors are against "
        "that exact arithmetic, relative (Frobenius) and as the worst element over what rounding explains."
    )


def _correctness_cells(side: str, row: CorrectnessRow) -> tuple[str, ...]:
    failed = [name for name, held in row.gates.items() if not held]
    return (
        side,
        row.shape,
        _inputs(row),
        formatting.error(row.error.max_abs_err if row.error else None),
        formatting.error(row.error.mean_abs_err if row.error else None),
        formatting.error(row.error.pct_bad if row.error else None),
        formatting.error(row.format_error.max_abs_err),
        formatting.error(row.format_error.mean_abs_err),
        formatting.error(row.kernel_error.relative_error if row.kernel_error else None),
        formatting.error(row.bound_ratio),
        facts.row_status(row),
        facts.SKIPPED if row.is_skipped else "; ".join([*failed, *row.notes]),
    )


def _inputs(row: CorrectnessRow) -> str:
    """Return the seed of a row, with marks for random cases and variants."""
    marks = [mark for mark, shown in (("drawn", row.drawn), (row.variant, row.variant != NORMAL)) if shown]
    return ", ".join([str(row.seed), *marks])


def _parity(record: Record) -> str:
    if not record.parity:
        return "PENDING: the outputs of the two sides were not compared"
    same = sum(row.identical for row in record.parity)
    worst = max(row.max_abs_diff for row in record.parity)
    rows = [
        (
            row.shape,
            str(row.seed),
            formatting.yes(row.identical),
            str(row.different_elements),
            formatting.error(row.max_abs_diff),
        )
        for row in record.parity
    ]
    numbers = ("different elements", "largest difference")
    lead = f"Bit-exact on {same}/{len(rows)}" + ("." if same == len(rows) else f"; largest difference {worst:.3g}.")
    return f"{lead}\n\n" + formatting.table(("shape", "seed", "bit-exact", *numbers), rows, right=numbers)


def _performance(record: Record, plot: str | None) -> str:
    if record.quoted is not None:
        return f"{formatting.without_html(facts.gate_line(record, 'PERFORMANCE'))}\n\n{cached_section(record.quoted)}"
    parts = [*([f"![block medians and speedups]({plot})"] if plot else []), *_speedups(record), *_timings(record)]
    return "\n\n".join(parts) if parts else formatting.without_html(facts.gate_line(record, "PERFORMANCE"))


def _speedups(record: Record) -> Iterator[str]:
    if record.speedups:
        yield speedup_table(record.speedups)
    elif record.baseline.timing or record.candidate.timing:
        yield formatting.without_html(f"Speedup: {facts.gate_line(record, 'PERFORMANCE')}")


def _timings(record: Run) -> Iterator[str]:
    rows = [
        (
            name,
            row.shape,
            str(row.seed),
            row.method,
            row.cache,
            *(formatting.micros(us) for us in (row.p50_us, row.p90_us, row.mean_us, row.std_us)),
            formatting.percent(row.std_us / row.mean_us) if row.mean_us else formatting.NONE,
            f"{row.iters_per_sec:.0f}",
            f"{row.timed_iters} after {row.warmup_iters}, {row.discarded_iters} discarded",
        )
        for name, side in record.sides()
        for row in side.timing
    ]
    if rows:
        numbers = ("p50 µs", "p90 µs", "mean µs", "std µs", "std / mean", "per second")
        header = ("side", "shape", "seed", "method", "cache", *numbers, "iterations")
        yield formatting.table(header, rows, right=numbers)


def _builds(record: Run) -> Iterator[tuple[str, str, Build]]:
    """Yield (role, variant, build) of every kernel."""
    for name, side in record.sides():
        for build in side.builds:
            yield name, side.variant, build


def resources(record: Run) -> str:
    """Return a table of the compiler resources of every kernel."""
    rows = [
        (
            side,
            variant,
            formatting.dims(build.dims),
            str(r.registers),
            formatting.kilobytes(r.smem_bytes),
            f"{r.static_smem_bytes} + {r.dynamic_smem_bytes}",
            str(r.stack_bytes),
            f"{r.spill_store_bytes} / {r.spill_load_bytes}",
        )
        for side, variant, build in _builds(record)
        if (r := build.resources) is not None
    ]
    if not rows:
        return formatting.without_html(facts.gate_line(record, "RESOURCES" if any(_builds(record)) else "BUILD"))
    numbers = ("registers", "SMEM", "static + dynamic bytes", "stack bytes", "spill store / load bytes")
    return formatting.table(("side", "variant", "dims", *numbers), rows, right=numbers)


def _evidence(record: Record) -> str:
    builds = list(_builds(record))
    counters = sorted({counter for _, _, build in builds for counter in build.machine_code})
    lead = formatting.without_html(facts.gate_line(record, "EVIDENCE"))
    counted = counts_section(record.sides(), record.least_work)
    lead = f"{lead}\n\n{counted}" if counted else lead
    if not counters:
        return lead
    rows = [
        (side, formatting.dims(build.dims), *(str(build.machine_code.get(c, formatting.NONE)) for c in counters))
        for side, _, build in builds
    ]
    table = formatting.table(("side", "dims", *counters), rows, right=counters)
    return f"{lead}\n\nInstructions in the machine code:\n\n{table}"


def _decision(record: Record) -> str:
    reasons = formatting.bullets(record.reasons)
    return "\n\n".join([f"**{record.decision}**", *([reasons] if reasons else []), *_exam(record)])


def _exam(record: Record) -> Iterator[str]:
    if record.exam is None:
        return
    asked = "the whole exam" if record.exam.complete else ", ".join(record.exam.missing)
    seed = record.exam.seed
    drawn = "" if seed is None else f"; drawn from {seed}: {', '.join(record.exam.drawn) or 'a seed'}"
    yield formatting.without_html(f"Asked: {asked}{drawn}.")


def provenance(record: Run) -> list[tuple[str, str]]:
    """Return the sections on how to reproduce a run and on its environment."""
    return [("How to reproduce", _reproduce(record)), ("Build metadata", _metadata(record))]


def _reproduce(record: Run) -> str:
    command = "```\n" + printable(formatting.one_line(record.command)).replace("`", "'") + "\n```"
    found: dict[tuple[str, str], tuple[str, dict[str, str]]] = {}
    for name, side in record.sides():
        for row in side.correctness:
            _, digests = found.setdefault((row.shape, _inputs(row)), (formatting.dims(row.dims), {}))
            digests[name] = row.inputs_digest
    if not found:
        return command
    rows = [(shape, sizes, seed, _digest_cell(digests)) for (shape, seed), (sizes, digests) in found.items()]
    return f"{command}\n\nInputs (SHA-256 of the arrays, shortened):\n\n" + formatting.table(
        ("shape", "dims", "seed", "digest"), rows
    )


def _digest_cell(digests: dict[str, str]) -> str:
    different = len(set(digests.values())) > 1
    if different:
        return "DIFFERENT INPUTS: " + ", ".join(f"{side} {digest}" for side, digest in digests.items())
    return next(iter(digests.values()))


def _metadata(record: Run) -> str:
    rows = [("created", record.created), ("task", record.task), ("format", record.format), ("arch", record.arch)]
    rows += [(f"{name} toggles", formatting.dims(side.toggles)) for name, side in record.sides()]
    for side, _, build in _builds(record):
        kernel = f"{side} kernel, {formatting.dims(build.dims)}"
        cached = ", from cache" if build.from_cache else ""
        rows += [
            (
                kernel,
                f"{build.entry} in {build.source}, {build.compiler}, {build.arch}, {build.compile_ms:.0f} ms{cached}",
            ),
            (f"{kernel}: options", " ".join(build.options) or formatting.NONE),
            (f"{kernel}: hash of the source", build.kernel_hash),
            (f"{kernel}: hash of the machine code", build.code_hash or formatting.NONE),
        ]
    git = record.git
    rows.append(("git", f"{git.sha} on {git.branch}, {'dirty' if git.dirty else 'clean'}"))
    rows += _device(record)
    rows += [(f"clock: {name}", f"{value:g}") for name, value in sorted(record.clocks.items())]
    rows += sorted(record.environment.items())
    rows.append(("greenfast", f"{record.package_version}, record schema {record.schema_version}"))
    return formatting.table(("what", "value"), rows)


def _device(record: Run) -> list[tuple[str, str]]:
    d = record.device
    if d is None:
        return [("device", facts.device(record))]
    memory = f"memory {d.memory_bytes / 2**30:.1f} GiB, L2 {d.l2_bytes / 2**20:.1f} MiB"
    return [
        ("device", f"{facts.device(record)}, compute capability {d.compute_capability}"),
        ("CUDA, driver", f"{d.cuda_version}, {d.driver}"),
        *([("device size", f"{d.sm_count} SMs at {d.sm_clock_mhz} MHz, {memory}")] if d.sm_count else []),
    ]

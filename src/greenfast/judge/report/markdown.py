"""Conversion of a record to Markdown: the full report, and a short form for a pull request."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from greenfast.judge.gates.registry import GATES
from greenfast.judge.record_schema import AnyRecord, PhaseRecord, Record, Run
from greenfast.judge.report import facts, formatting
from greenfast.judge.report.facts import PHASE_HEADER, describe_source, phase_rows, speedup_line
from greenfast.judge.report.formatting import Section
from greenfast.spec.facts import Resources
from greenfast.spec.printable import printable

_SHORT_REASONS = 2
_SHORT_CHARACTERS = 600


def report(record: AnyRecord, *, plot: str | None = None) -> str:
    """Return the full report of any record. plot: path of a figure of this record, relative to the report."""
    headline = [formatting.bullets(_headline(record))] if isinstance(record, Record) else []
    return document(title(record), list_sections(record, plot), lead=headline)


def title(record: AnyRecord) -> str:
    """Return the title of a record's report."""
    if isinstance(record, Record):
        return f"{record.task}: {record.baseline.variant} -> {record.candidate.variant}, {record.decision}"
    phases = "phases of " if isinstance(record, PhaseRecord) else ""
    return f"{record.task}: {phases}{record.side.variant}"


def list_sections(record: AnyRecord, plot: str | None = None) -> list[Section]:
    """Return the report's sections. Each gate gives its own."""
    if isinstance(record, PhaseRecord):
        return [Section("Phases", _phases(record)), *provenance(record)]
    ordered = sorted(GATES.values(), key=lambda gate: not gate.runs_kernels)
    return [
        Section("Gates", [gates(record)]),
        *(section for gate in ordered for section in gate.sections(record, plot)),
        *([Section("Decision", [_decision(record)])] if isinstance(record, Record) else []),
        *provenance(record),
    ]


def _phases(record: PhaseRecord) -> list[str]:
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
    return tables


def document(title: str, sections: Sequence[Section], lead: Sequence[str] = ()) -> str:
    """Return a document with a title, leading paragraphs and sections."""
    body = ["\n\n".join([f"## {section.title}", *section.parts]) for section in sections]
    return printable("\n\n".join([formatting.without_html(f"# {title}"), *lead, *body]) + "\n")


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
        f"Device: {facts.device(record)}; commit {record.git.short}; {record.created}",
        f"Reproduce: {formatting.code(record.command)}",
    ]
    sides = f"{formatting.code(record.baseline.variant)} -> {formatting.code(record.candidate.variant)}"
    title = f"**{record.decision}**: {record.task}, {sides}, {record.format}, {record.arch}"
    return f"{formatting.without_html(title)}\n\n{formatting.bullets(lines)}\n"


def _headline(record: Record) -> list[str]:
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


def provenance(record: Run) -> list[Section]:
    """Return the sections on how to reproduce a run and on its environment."""
    return [Section("How to reproduce", [_reproduce(record)]), Section("Build metadata", [_metadata(record)])]


def _reproduce(record: Run) -> str:
    command = "```\n" + printable(formatting.one_line(record.command)).replace("`", "'") + "\n```"
    inputs: dict[tuple[str, str], tuple[str, dict[str, str]]] = {}
    for name, side in record.sides():
        for row in side.correctness:
            _, digests = inputs.setdefault((row.shape, facts.describe_inputs(row)), (formatting.dims(row.dims), {}))
            digests[name] = row.inputs_digest
    if not inputs:
        return command
    rows = [(shape, sizes, seed, _digest_cell(digests)) for (shape, seed), (sizes, digests) in inputs.items()]
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
    for side, _, build in facts.list_builds(record):
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
    rows.append(("git", record.git.details))
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

"""Facts of a record for reports, as Markdown: worst cases, gate results, speedups, and the emulator's counts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import median

from greenfast.judge.record_schema import (
    DRAWN,
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
from greenfast.spec.facts import KernelCounts, Resources
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


def select_timing(side: Side, row: SpeedupRow) -> list[TimingRow]:
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


def device(record: Run) -> str:
    """Return the device's name, with its kind if it is not a GPU; "no device" if the run only compiled."""
    if record.device is None:
        return "no device"
    return record.device.name if record.device.kind == "gpu" else f"{record.device.name} ({record.device.kind})"


def speedup_table(speedups: Sequence[SpeedupRow]) -> str:
    """Return a table with a row per shape and cache state."""
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
    """Return the deciding speedups in one line."""
    return "; ".join(
        f"{row.shape} ({row.cache}) {formatting.speedup(row.speedup)} {formatting.interval(row.ci_low, row.ci_high)}, "
        f"required {formatting.requirement(row.required)}: {row.verdict}"
        for row in rows
    )


def describe_source(quote: CachedTiming) -> str:
    """Return device, day and commit of cached timings."""
    return f"quoted from {quote.device.name}, {quote.created[:10]}, commit {quote.git.short}"


def cached_section(quote: CachedTiming) -> str:
    """Return the speedups of another run, under a heading with their source."""
    return (
        f"### Not measured in this run: {formatting.without_html(describe_source(quote))}\n\n"
        "Nothing was timed here. These are the speedups of a kept record of the same kernels (equal hashes, compiler "
        "and options), on the same inputs, with the verdicts against the requirement here:\n\n"
        f"{speedup_table(quote.speedups)}\n\n"
        + formatting.table(
            ("quoted", "value"),
            [
                ("record", quote.path),
                ("SHA-256 of the record", quote.sha256),
                ("created", quote.created),
                ("device", f"{quote.device.name}, driver {quote.device.driver}, CUDA {quote.device.cuda_version}"),
                ("git", quote.git.details),
                ("command", quote.command),
            ],
        )
    )


#: Titles of the counts by name in KernelCounts, in the order of the table.
SHOWN = {
    "warp_instructions": "warp instructions (PTX)",
    "matrix_instructions": "matrix instructions",
    "matrix_flops": "matrix FLOPs",
    "exponentials": "exponentials",
    "barriers": "barriers (warps)",
    "global_load_bytes": "global bytes loaded",
    "global_load_sectors": "global sectors loaded",
    "global_store_bytes": "global bytes stored",
    "global_store_sectors": "global sectors stored",
    "shared_load_bytes": "shared bytes loaded",
    "shared_store_bytes": "shared bytes stored",
    "shared_load_conflicts": "bank conflicts of loads",
    "shared_store_conflicts": "bank conflicts of stores",
}
_KINDS = 12


def counts_section(sides: Sequence[tuple[str, Side]], least_work: Mapping[str, Mapping[str, int]]) -> str:
    """Return the section with the counts; empty if no implementation has counts.

    sides: pairs of role and results. least_work: the problem's minimum by shape and name.
    """
    counted = list(dict.fromkeys(shape for _, side in sides for shape in side.counts))
    if not counted:
        return ""
    shapes = [shape for shape in counted if not shape.startswith(DRAWN)] or counted  # the task's own, if there are any
    by_shape = {shape: {role: side.counts[shape] for role, side in sides if shape in side.counts} for shape in shapes}
    largest = max(shapes, key=lambda shape: max(c.warp_instructions for c in by_shape[shape].values()))
    lines = _lines(by_shape[largest])
    return "\n\n".join(
        [
            "Counts of one launch, `emulated`: of PTX instructions, before ptxas makes the machine code. `least` is "
            "the minimum of the problem; products done without matrix instructions have no matrix FLOPs. Counts "
            "that are 0 on all sides have no row.",
            _table([role for role, _ in sides], by_shape, least_work),
            *([f"Shared memory by source line, {largest}:", lines] if lines else []),
            f"Warp instructions by kind, {largest}:",
            _kinds(by_shape[largest]),
        ]
    )


def _table(
    roles: Sequence[str],
    by_shape: Mapping[str, Mapping[str, KernelCounts]],
    least_work: Mapping[str, Mapping[str, int]],
) -> str:
    """Return a table with one row per shape and count. The ratio is the last column over the first."""
    header = ("shape", "count", *roles, *(["ratio"] if len(roles) > 1 else []), "least", f"{roles[-1]} / least")

    def rows() -> Iterator[tuple[str, ...]]:
        for shape, counts in by_shape.items():
            for key, title in SHOWN.items():
                values = [getattr(counts[role], key) if role in counts else None for role in roles]
                least = least_work.get(shape, {}).get(key)
                if not any((*values, least)):
                    continue
                ratio = [_format_ratio(values[-1], values[0])] if len(roles) > 1 else []
                cells = [formatting.NONE if v is None else str(v) for v in (*values, least)]
                yield (shape, title, *cells[:-1], *ratio, cells[-1], _format_ratio(values[-1], least))

    return formatting.table(header, rows(), right=header[2:])


def _format_ratio(count: int | None, other: int | None) -> str:
    return f"{count / other:.2f}x" if count is not None and other else formatting.NONE


def _lines(counts: Mapping[str, KernelCounts]) -> str:
    """Return the table of shared memory by source line; empty if none uses it."""
    lines = sorted({line for c in counts.values() for line in c.shared_bytes}, key=_by_number)
    header = ("line", *(f"{name}: {unit}" for name in counts for unit in ("bytes", "bank conflicts")))
    rows = [
        (
            line,
            *(
                str(values.get(line, 0)) if line in c.shared_bytes else formatting.NONE
                for c in counts.values()
                for values in (c.shared_bytes, c.bank_conflicts)
            ),
        )
        for line in lines
    ]
    return formatting.table(header, rows, right=header[1:]) if rows else ""


def _by_number(line: str) -> tuple[str, int]:
    file, _, number = line.rpartition(":")
    return file, int(number) if number.isdigit() else 0


def _kinds(counts: Mapping[str, KernelCounts]) -> str:
    total = {kind: 0 for c in counts.values() for kind in c.instructions}
    for c in counts.values():
        for kind, n in c.instructions.items():
            total[kind] += n
    shown = sorted(total, key=lambda kind: (-total[kind], kind))[:_KINDS]
    rows = [(kind, *(str(c.instructions.get(kind, 0)) for c in counts.values())) for kind in shown]
    if len(total) > len(shown):
        others = [sum(n for kind, n in c.instructions.items() if kind not in shown) for c in counts.values()]
        rows.append((f"{len(total) - len(shown)} others", *map(str, others)))
    return formatting.table(("kind", *counts), rows, right=tuple(counts))


#: The columns of a table of phases.
PHASE_HEADER = (
    *("phase", "warp instructions", "share", "matrix FLOPs", "exponentials", "barriers"),
    *("global sectors", "shared bytes", "bank conflicts"),
)


def phase_rows(counts: Mapping[str, KernelCounts]) -> list[tuple[str, ...]]:
    """Return one row of counts per phase. Global sectors and shared bytes are sums of loads and stores."""
    total = sum(c.warp_instructions for c in counts.values()) or 1
    return [
        (
            phase,
            str(c.warp_instructions),
            formatting.percent(c.warp_instructions / total),
            str(c.matrix_flops),
            str(c.exponentials),
            str(c.barriers),
            str(c.global_load_sectors + c.global_store_sectors),
            str(c.shared_load_bytes + c.shared_store_bytes),
            str(c.conflicts),
        )
        for phase, c in counts.items()
    ]

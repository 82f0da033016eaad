"""Tables of the emulator's counts: both implementations beside the problem's minimum."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from greenfast.judge.record_schema import Side
from greenfast.judge.report import formatting
from greenfast.spec.facts import KernelCounts

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
    shapes = list(dict.fromkeys(shape for _, side in sides for shape in side.counts))
    if not shapes:
        return ""
    by_shape = {shape: {role: side.counts[shape] for role, side in sides if shape in side.counts} for shape in shapes}
    largest = max(shapes, key=lambda shape: max(c.warp_instructions for c in by_shape[shape].values()))
    return "\n\n".join(
        [
            "Counts of one launch, `emulated`: of PTX instructions, of which ptxas makes the machine code. `least` is "
            "what the problem needs; products done without matrix instructions have no matrix FLOPs.",
            _table([role for role, _ in sides], by_shape, least_work),
            f"Shared memory by source line, {largest}:",
            _lines(by_shape[largest]),
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
                ratio = [_format_ratio(values[-1], values[0])] if len(roles) > 1 else []
                cells = [formatting.NONE if v is None else str(v) for v in (*values, least)]
                yield (shape, title, *cells[:-1], *ratio, cells[-1], _format_ratio(values[-1], least))

    return formatting.table(header, rows(), right=header[2:])


def _format_ratio(count: int | None, other: int | None) -> str:
    return f"{count / other:.2f}x" if count is not None and other else formatting.NONE


def _lines(counts: Mapping[str, KernelCounts]) -> str:
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
    return formatting.table(header, rows, right=header[1:])


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

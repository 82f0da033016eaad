"""The own kernel beside its peers, as tables: for the report, the README and the console."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from greenfast.judge.peers import OWN, PeerAccuracyRow, PeerContender, PeerRow
from greenfast.judge.record import PeersRecord
from greenfast.judge.report import facts, format
from greenfast.spec.freshness import STALE, Freshness

_RATIO = "greenfast / better FP8 peer"


def ratios(rows: Sequence[PeerRow], contenders: Sequence[PeerContender]) -> dict[str, float]:
    """By shape, the time of the fastest FP8 peer over greenfast's: above 1 greenfast is faster.

    Without the shapes where greenfast or every FP8 peer has no time.
    """
    peers = {c.name for c in contenders if c.precision == "fp8" and c.name != OWN}
    found = {}
    for shape in dict.fromkeys(row.shape for row in rows):
        times = {r.contender: r.median_us for r in rows if r.shape == shape and r.median_us is not None}
        rivals = [us for name, us in times.items() if name in peers]
        if OWN in times and rivals:
            found[shape] = min(rivals) / times[OWN]
    return found


def geometric_mean(values: Sequence[float]) -> float:
    """exp of the mean logarithm."""
    return math.exp(math.fsum(map(math.log, values)) / len(values))


def headline(rows: Sequence[PeerRow], contenders: Sequence[PeerContender]) -> str:
    """The geometric mean over the grid, or over what was measured of it, and the worst shape."""
    found = ratios(rows, contenders)
    if not found:
        return "no FP8 peer was timed beside greenfast"
    grid = {shape: found[shape] for shape in dict.fromkeys(r.shape for r in rows if r.grid) if shape in found}
    where, what = (grid, "of the grid") if grid else (found, "outside of the grid")
    worst = min(where, key=lambda shape: where[shape])
    every = len({row.shape for row in rows if row.grid == bool(grid)})
    of = "" if len(where) == every else f" of {every}"
    return (
        f"{format.speedup(geometric_mean(list(where.values())))} the speed of the better FP8 peer, geometric mean over "
        f"{len(where)}{of} shapes {what}; worst {worst} {format.speedup(where[worst])}"
    )


def reasons(record: PeersRecord) -> list[str]:
    """Why contenders have no numbers: who is missing, and on which shapes the others failed."""
    found: dict[tuple[str, str], list[str]] = {}
    everywhere = [(row.contender, row.reason, row.shape) for row in record.rows]
    everywhere += [
        (row.contender, row.reason, f"accuracy at {format.dims(row.dims)}, {row.inputs}") for row in record.accuracy
    ]
    for contender, reason, where in everywhere:
        if reason:
            found.setdefault((_label(record.contenders, contender), reason), []).append(where)
    missing = {(c.label, c.missing) for c in record.contenders}
    return [
        f"{label}: {reason}" if (label, reason) in missing else f"{label} on {', '.join(shapes)}: {reason}"
        for (label, reason), shapes in found.items()
    ]


def console_table(
    rows: Sequence[PeerRow], contenders: Sequence[PeerContender]
) -> tuple[list[str], list[list[str]]]:  # fmt: skip
    """(header, rows): per shape each contender's microseconds and TFLOP/s, and the ratio."""
    found = ratios(rows, contenders)
    shown = []
    for shape, cells in _by_shape(rows).items():
        times = [_console_cell(cells.get(c.name)) for c in contenders]
        shown.append([shape, *times, format.speedup(found[shape]) if shape in found else format.NONE])
    return ["shape", *(c.label for c in contenders), "ratio"], shown


def _console_cell(row: PeerRow | None) -> str:
    if row is None or row.median_us is None or row.tflops is None:
        return format.NONE
    return f"{format.micros(row.median_us)} µs {row.tflops:.0f}"


def summary(record: PeersRecord) -> str:
    """The headline, the tables of times and errors, and the reasons where there are none: for report and README."""
    parts = [
        f"{headline(record.rows, record.contenders)}.",
        *_grid_table(record),
        *_small_table(record),
        *_inputs_table(record),
        *_length_table(record),
    ]
    said = reasons(record)
    return "\n\n".join([*parts, *([format.bullets(said)] if said else [])])


def readme_section(path: str, record: PeersRecord, answer: Freshness | None = None) -> str:
    """The README's section with its heading; without a number where the record's kernel is not today's."""
    heading = "## Beside its peers"
    if answer and answer.status == STALE:
        return f"{heading}\n\nThe measurement in [{path}]({path}) is {answer}."
    versions = ", ".join(c.version for c in record.contenders if c.version and c.name != OWN and c.precision == "fp8")
    return (
        f"{heading}\n\nThe Hopper kernel of `{record.task}` and libraries that compute the same, timed in turns in one "
        f"run on {facts.device(record)}; {record.created[:10]}; commit {facts.commit(record)}"
        f"{f'; {versions}' if versions else ''}; [record and report]({path}).\n\n{summary(record)}"
    )


def samples_table(record: PeersRecord) -> str:
    """Every contender on every shape, with the spread of its rounds and the clocks."""
    numbers = ("median µs", "p25 µs", "p75 µs", "TFLOP/s", "error", "kernel error")
    lines = [
        (
            row.shape,
            _label(record.contenders, row.contender),
            *(format.NONE if us is None else format.micros(us) for us in (row.median_us, row.p25_us, row.p75_us)),
            format.NONE if row.tflops is None else f"{row.tflops:.1f}",
            format.error(row.error),
            format.error(row.kernel_error),
            f"{row.rounds} x {row.calls}" if row.rounds else format.NONE,
            row.cache,
            ", ".join(f"{name} {value:.0f}" for name, value in row.clocks.items()),
            row.reason,
        )
        for row in record.rows
    ]
    header = ("shape", "contender", *numbers, "rounds x calls", "L2", "clocks", "reason")
    return (
        f"{format.table(header, lines, right=numbers)}\n\nA time is that of a replay of a captured CUDA graph of so "
        "many calls, divided by them; a round replays each contender's graph once, in an order that moves on. Inputs "
        "are drawn from N(0, 1) on the GPU by a torch.Generator with seed 0 and are quantized before the timing. "
        "error: relative (Frobenius), against attention in float64 on the unquantized inputs, over rows sampled from "
        "every head; kernel error: against exact arithmetic on the codes, for those that read the same codes."
    )


def _by_shape(rows: Sequence[PeerRow]) -> dict[str, dict[str, PeerRow]]:
    found: dict[str, dict[str, PeerRow]] = {}
    for row in rows:
        found.setdefault(row.shape, {})[row.contender] = row
    return found


def _label(contenders: Sequence[PeerContender], name: str) -> str:
    return next((c.label for c in contenders if c.name == name), name)


def _sizes(dims: Mapping[str, int]) -> str:
    return ", ".join(str(dims[name]) for name in "BHSD")


def _grid_table(record: PeersRecord) -> list[str]:
    rows = [row for row in record.rows if row.grid]
    if not rows:
        return []
    found = ratios(rows, record.contenders)
    labels = [c.label for c in record.contenders]
    lines = []
    for shape, cells in _by_shape(rows).items():
        dims = next(iter(cells.values())).dims
        rates = [_rate(cells.get(c.name)) for c in record.contenders]
        ratio = format.speedup(found[shape]) if shape in found else format.NONE
        lines.append((_sizes(dims), "causal" if dims.get("CAUSAL") else "full", *rates, ratio))
    table = format.table(("B, H, S, D", "mask", *labels, _RATIO), lines, right=(*labels, _RATIO))
    return [f"TFLOP/s, counted as 4·B·H·S²·D, half of it with a mask:\n\n{table}"]


def _rate(row: PeerRow | None) -> str:
    return format.NONE if row is None or row.tflops is None else f"{row.tflops:.0f}"


def _small_table(record: PeersRecord) -> list[str]:
    rows = [row for row in record.rows if not row.grid]
    if not rows:
        return []
    found = ratios(rows, record.contenders)
    labels = [c.label for c in record.contenders]
    lines = []
    for shape, cells in _by_shape(rows).items():
        first = next(iter(cells.values()))
        times = [cells[c.name].median_us if c.name in cells else None for c in record.contenders]
        ratio = format.speedup(found[shape]) if shape in found else format.NONE
        shown = [format.NONE if us is None else format.micros(us) for us in times]
        lines.append((f"{shape} ({_sizes(first.dims)})", first.cache, *shown, ratio))
    table = format.table(("shape (B, H, S, D)", "L2", *labels, _RATIO), lines, right=(*labels, _RATIO))
    return [f"Small shapes, µs per call; warm: all data of a call lie in L2 from the call before:\n\n{table}"]


def _inputs_table(record: PeersRecord) -> list[str]:
    rows = [row for row in record.accuracy if row.series == "inputs"]
    if not rows:
        return []
    errors = {(row.contender, _drawn(row)): row.error for row in rows}
    names = list(dict.fromkeys(map(_drawn, rows)))
    lines = [(c.label, *(format.error(errors.get((c.name, name))) for name in names)) for c in record.contenders]
    table = format.table(("contender", *names), lines, right=names)
    return [
        "Relative error of the output (Frobenius) against attention on the unquantized inputs, N(0, 1) or with "
        f"outliers N(0, 1) + N(0, 100)·Bernoulli(0.001); B, H, S, D:\n\n{table}"
    ]


def _drawn(row: PeerAccuracyRow) -> str:
    return f"{_sizes(row.dims)}, {row.inputs}"


def _length_table(record: PeersRecord) -> list[str]:
    rows = [row for row in record.accuracy if row.series == "length"]
    if not rows:
        return []
    errors = {(row.contender, row.dims["S"]): row.kernel_error for row in rows}
    lengths = list(dict.fromkeys(row.dims["S"] for row in rows))
    names = [f"S={s}" for s in lengths]
    those = {row.contender for row in rows}
    lines = [
        (c.label, *(format.error(errors.get((c.name, s))) for s in lengths))
        for c in record.contenders
        if c.name in those
    ]
    table = format.table(("contender", *names), lines, right=names)
    return [
        f"Error of the kernel alone, against exact arithmetic on the same codes, by length (D={rows[0].dims['D']}, one "
        f"head, {rows[0].sampled} of its query rows):\n\n{table}"
    ]

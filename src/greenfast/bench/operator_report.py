"""A record of the operator as Markdown."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from greenfast.bench.operator_record import INPUTS, OperatorRecord, SpeedRow
from greenfast.spec.freshness import STALE, Freshness

_BYTES = 3  # that quantization must move for each element: two read, one written


def _table(header: Sequence[str], rows: Sequence[Sequence[str]], text_columns: int) -> str:
    rule = ["---"] * text_columns + ["---:"] * (len(header) - text_columns)
    return "\n".join("| " + " | ".join(row) + " |" for row in (header, rule, *rows))


def _shapes(record: OperatorRecord) -> list[tuple[dict[str, int], dict[str, SpeedRow]]]:
    """Dimensions and the rows of each shape by call, in the order of the record."""
    found: dict[tuple[tuple[str, int], ...], dict[str, SpeedRow]] = {}
    for row in record.speed:
        found.setdefault(tuple(row.dims.items()), {})[row.call] = row
    return [(dict(dims), calls) for dims, calls in found.items()]


def _best_torch(calls: Mapping[str, SpeedRow]) -> float:
    return min(row.median_us for name, row in calls.items() if name.startswith("torch"))


def _elements(dims: Mapping[str, int]) -> int:
    return 3 * dims["B"] * dims["H"] * dims["S"] * dims["D"]


def speed_table(record: OperatorRecord) -> str:
    """Device time of every shape, and the speed of sdpa beside PyTorch's faster bfloat16 backend."""
    rows = []
    for dims, calls in _shapes(record):
        best = _best_torch(calls)
        times = [calls[c].median_us for c in ("sdpa fp8", "sdpa int8", "quantize fp8", "attention fp8")]
        rows.append(
            (
                ", ".join(str(dims[d]) for d in "BHSD"),
                "causal" if dims.get("CAUSAL") else "full",
                *(f"{us:.0f}" for us in times),
                f"{best:.0f}",
                f"{best / times[0]:.2f}x",
                f"{best / times[1]:.2f}x",
            )
        )
    header = (
        "B, H, S, D", "mask", "sdpa fp8, µs", "sdpa int8, µs", "quantizing Q, K, V alone, µs", "on kept codes, µs",
        "torch bf16, µs", "fp8 / torch", "int8 / torch",
    )  # fmt: skip
    return _table(header, rows, 2)


def quantize_table(record: OperatorRecord) -> str:
    """Bandwidth of the quantization, its three bytes for each element counted, beside a copy of as many bytes."""
    rows = []
    for dims, calls in _shapes(record):
        if dims.get("CAUSAL"):
            continue
        us = calls["quantize fp8"].median_us
        rate = _BYTES * _elements(dims) / us / 1e6
        share = f"{100 * calls['copy'].median_us / us:.0f} %" if "copy" in calls else "-"
        rows.append((", ".join(str(dims[d]) for d in "BHSD"), f"{us:.0f}", f"{rate:.2f}", share))
    return _table(("B, H, S, D", "µs", "TB/s", "of a copy's bandwidth"), rows, 1)


def host_table(record: OperatorRecord) -> str:
    """Host time of an eager call."""
    rows = [(row.call, f"{row.median_us:.1f}", f"{row.least_us:.1f}") for row in record.host]
    return _table(("eager call on mission", "median, µs", "least, µs"), rows, 1)


def error_table(record: OperatorRecord) -> str:
    """Errors by inputs and head dim, and call."""
    calls = list(dict.fromkeys(row.call for row in record.errors))
    cells = {(row.inputs, row.dims["D"], row.call): row.error for row in record.errors}
    rows = []
    for kind, head_dim in dict.fromkeys((row.inputs, row.dims["D"]) for row in record.errors):
        values = [cells.get((kind, head_dim, call)) for call in calls]
        rows.append((kind, str(head_dim), *("-" if value is None else f"{value:.4f}" for value in values)))
    return _table(("inputs", "D", *calls), rows, 1)


def clocks_line(record: OperatorRecord) -> str:
    """The range of clocks and temperatures, where the driver tells them: a hot board is a slow one."""
    found = [row.clocks for row in record.speed if row.clocks]
    if not found:
        return ""
    mhz, degrees = ([c[name] for c in found if name in c] for name in ("sm_mhz", "temperature_c"))
    return f"SM clock {min(mhz):.0f} to {max(mhz):.0f} MHz at {min(degrees):.0f} to {max(degrees):.0f} °C."


def headline(record: OperatorRecord) -> str:
    """The speed beside PyTorch in a sentence, by length, over head dims 64 and 128."""
    parts = []
    for causal, mask in ((0, "without a mask"), (1, "with a causal mask")):
        ratios: dict[int, list[float]] = {}
        for dims, calls in _shapes(record):
            if dims["D"] < 256 and dims.get("CAUSAL", 0) == causal:
                ratios.setdefault(dims["S"], []).append(_best_torch(calls) / calls["sdpa fp8"].median_us)
        means = {s: math.exp(sum(map(math.log, r)) / len(r)) for s, r in ratios.items()}
        parts.append(f"{mask} {', '.join(f'{mean:.2f}x at S={s}' for s, mean in means.items())}")
    return (
        "`sdpa` in fp8, quantization included, beside the faster of torch's bfloat16 backends, geometric mean of head "
        f"dims 64 and 128: {'; '.join(parts)}."
    )


def tables(record: OperatorRecord, answer: Freshness | None = None) -> str:
    """All tables with a line of provenance, and whether the kernels have changed since."""
    commit, day, torch = record.git.sha[:10], record.created[:10], record.environment.get("torch", "?")
    kinds = [kind for kind in dict.fromkeys(row.inputs for row in record.errors) if kind in INPUTS and kind != "normal"]
    measured = f"{str(answer).capitalize()}. Measured" if answer and answer.status == STALE else "Measured"
    return "\n\n".join(
        (
            f"{measured} on {record.device.name}, {day}, commit {commit}, torch {torch}. {headline(record)}",
            *([clocks_line(record)] if clocks_line(record) else []),
            "Device time of a call, median over replayed graphs, everyone in turns:",
            speed_table(record),
            "Quantization alone, counting the three bytes that each element must move, and a copy of as many:",
            quantize_table(record),
            "Host time:",
            host_table(record),
            "Relative error (Frobenius) against exact attention on the unrounded inputs; B=1, H=8, S=2048:",
            error_table(record),
            "Inputs are N(0, 1), or " + "; ".join(f"*{k}* {INPUTS[k]}" for k in kinds) + "." if kinds else "",
        )
    )


def report(record: OperatorRecord) -> str:
    """The report of a run."""
    return f"# greenfast's operator beside PyTorch\n\n`{record.command}`\n\n{tables(record)}\n"

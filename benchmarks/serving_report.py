"""Format the serving comparison as tables and as panels of a figure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.ratios import by_shape, ratios, select_group
from benchmarks.record_schema import BackendFacts, Benchmark, Row
from benchmarks.serving_cases import append_bytes, kv_bytes
from greenfast.judge.report import formatting

#: Bytes per element of K and V, by the precision of a backend.
_ITEM = {"fp8": 1, "bf16": 2}


@dataclass(frozen=True)
class ServingTable:
    """A table. title: describes the numbers. right: number of numeric columns at the end."""

    title: str
    header: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    right: int


def serving_tables(record: Benchmark) -> list[str]:
    """Format the tables in Markdown."""
    return [
        f"{t.title}:\n\n{formatting.table(t.header, t.rows, right=t.header[len(t.header) - t.right :])}"
        for t in tables(record)
    ]


def tables(record: Benchmark) -> list[ServingTable]:
    """Return the tables of decode, prefill and append that have rows."""
    return [table for table in (_decode(record), _prefill(record), _append(record)) if table.rows]


def read_rate(record: Benchmark) -> float | None:
    """Return the bandwidth of the fastest reduction in TB/s; None if none was timed."""
    timed = [row for row in select_group(record.rows, "read_") if row.median_us]
    return max((row.dims["BYTES"] / row.median_us / 1e6 for row in timed if row.median_us), default=None)


def rate(record: Benchmark, row: Row) -> float | None:
    """Return TB/s of K and V for decode, or TFLOP/s for prefill; None without a time or for other rows."""
    if row.median_us is None or row.tflops is None or "KEYS" not in row.dims:
        return None
    if "SQUARES" in row.dims:
        return row.tflops
    precision = next((c.precision for c in record.backends if c.name == row.backend), "fp8")
    return kv_bytes(row.dims, _ITEM[precision]) / row.median_us / 1e6


def short_name(shape: str) -> str:
    """Return the part of a shape's name after its heads: 8x32768, skewed."""
    return shape.split("_")[-1]


def heads(dims: Mapping[str, int]) -> str:
    """Format query heads, heads of K and V, and head dim: 32:8, 128."""
    return f"{dims['H']}:{dims['HK']}, {dims['D']}"


def panels(record: Benchmark) -> list[tuple[str, list[Row]]]:
    """Return the title and the rows of each panel of the figure."""
    found: dict[str, list[Row]] = {}
    for group, unit in (("decode", "TB/s of K and V"), ("prefill", "TFLOP/s")):
        for row in select_group(record.rows, f"{group}_"):
            if rate(record, row) is not None:
                found.setdefault(f"{group}, heads {heads(row.dims)}: {unit}", []).append(row)
    return list(found.items())


def _columns(record: Benchmark, rows: Sequence[Row]) -> list[BackendFacts]:
    """Return the backends with a rate on one of these rows."""
    names = {row.backend for row in rows if rate(record, row) is not None}
    return [c for c in record.backends if c.name in names]


def _micros(row: Row | None) -> str:
    return formatting.NONE if row is None or row.median_us is None else formatting.micros(row.median_us)


def _cell(record: Benchmark, row: Row | None) -> str:
    """Format microseconds, with the bandwidth in brackets."""
    value = rate(record, row) if row else None
    return _micros(row) if value is None else f"{_micros(row)} ({value:.2f})"


def _share(part: float | None, whole: float | None) -> str:
    return f"{100 * part / whole:.0f} %" if part and whole else formatting.NONE


def _ratio_columns(record: Benchmark, group: str) -> tuple[list[str], list[dict[str, float]]]:
    chosen = [versus for versus in record.versus if versus.group == group]
    return [versus.title.removeprefix(f"{group[:-1]}: ") for versus in chosen], [
        ratios(record.rows, versus) for versus in chosen
    ]


def _speedups(found: Sequence[Mapping[str, float]], shape: str) -> list[str]:
    return [formatting.speedup(one[shape]) if shape in one else formatting.NONE for one in found]


def _decode(record: Benchmark) -> ServingTable:
    rows, read = select_group(record.rows, "decode_"), read_rate(record)
    shown = _columns(record, rows)
    plans = [c for c in record.backends if c.name in ("plan", "vllm_fa3_plan") and not c.missing]
    titles, found = _ratio_columns(record, "decode_")
    lines = []
    for shape, cells in by_shape(rows).items():
        first = next(iter(cells.values()))
        own = cells.get("greenfast")
        lines.append(
            (
                heads(first.dims),
                short_name(shape),
                *(_cell(record, cells.get(c.name)) for c in shown),
                _share(rate(record, own) if own else None, read),
                *_speedups(found, shape),
                *(_micros(cells.get(c.name)) for c in plans),
            )
        )
    header = (*(c.label for c in shown), "of the read bandwidth", *titles, *(f"{c.label}, µs" for c in plans))
    of = f"; a reduction of 1 GiB reads {read:.2f} TB/s" if read else ""
    title = (
        "Decode, one query token for each sequence: µs (TB/s of the K and V attended to), caches beyond L2, pages of "
        f"64 tokens in random order; plans are made before the calls and stand apart{of}"
    )
    return ServingTable(title, ("heads q:kv, head dim", "sequences x keys", *header), lines, len(header))


def _prefill(record: Benchmark) -> ServingTable:
    rows = select_group(record.rows, "prefill_")
    shown = _columns(record, rows)
    titles, found = _ratio_columns(record, "prefill_")
    lines = []
    for shape, cells in by_shape(rows).items():
        first = next(iter(cells.values()))
        rates = [rate(record, row) if (row := cells.get(c.name)) else None for c in shown]
        values = [formatting.NONE if value is None else f"{value:.0f}" for value in rates]
        lines.append((heads(first.dims), short_name(shape), *values, *_speedups(found, shape)))
    header = (*(c.label for c in shown), *titles)
    title = (
        "Prefill, causal: TFLOP/s, half of the square counted; greenfast over a paged cache that holds the codes, and "
        "on bfloat16; FlashAttention-3 over K and V in rows, in FP8 over codes of Q, K and V"
    )
    return ServingTable(title, ("heads q:kv, head dim", "sequences x tokens", *header), lines, len(header))


def _append(record: Benchmark) -> ServingTable:
    lines = []
    for cells in by_shape(select_group(record.rows, "append_")).values():
        row, copy = cells.get("append"), cells.get("copy")
        if row is None or row.median_us is None:
            continue
        what = "QK-norm and RoPE" if row.dims.get("NORM") else "RoPE"
        of_copy = _share(copy.median_us, row.median_us) if copy else formatting.NONE
        moved = f"{append_bytes(row.dims) / row.median_us / 1e6:.2f}"
        lines.append((heads(row.dims), str(row.dims["TOKENS"]), what, _micros(row), moved, _micros(copy), of_copy))
    header = ("append, µs", "TB/s", "copy, µs", "of the copy's bandwidth")
    title = (
        "Append: Q, K and V in bfloat16 to Q, and to codes and scales in the pages; and a copy that moves as many "
        "bytes. 64 tokens lie in L2"
    )
    return ServingTable(title, ("heads q:kv, head dim", "tokens", "with", *header), lines, len(header))

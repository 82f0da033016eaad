"""Format records as tables: of the console, of reports in Markdown, and of the documentation."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.records import AccuracyRow, BackendFacts, Benchmark, Row, SpeedupPair
from benchmarks.serving_cases import append_bytes, kv_bytes
from greenfast.judge.gates.resources import resource_table
from greenfast.judge.report import facts, formatting
from greenfast.judge.report.formatting import Section
from greenfast.judge.report.markdown import document, gates, provenance
from greenfast.spec.freshness import STALE, Freshness


def ratios(rows: Sequence[Row], versus: SpeedupPair) -> dict[str, float]:
    """Return by shape the fastest baseline's time divided by the time of ``own``; above 1 ``own`` is faster.

    Shapes of other groups, and shapes without a time of ``own`` or of any baseline, are left out.
    """
    speedups = {}
    for shape, cells in by_shape(select_group(rows, versus.group)).items():
        times = {name: row.median_us for name, row in cells.items() if row.median_us is not None}
        baselines = [us for name, us in times.items() if name in versus.baselines]
        if versus.own in times and baselines:
            speedups[shape] = min(baselines) / times[versus.own]
    return speedups


def geometric_mean(values: Sequence[float]) -> float:
    """Return the geometric mean."""
    return math.exp(math.fsum(map(math.log, values)) / len(values))


def headline(rows: Sequence[Row], versus: Iterable[SpeedupPair]) -> str:
    """Describe each ratio: its geometric mean over the measured shapes of the grid, and the worst shape."""
    return "; ".join(_headline(rows, one) for one in versus)


def _headline(rows: Sequence[Row], versus: SpeedupPair) -> str:
    rows = select_group(rows, versus.group)
    speedups = ratios(rows, versus)
    if not speedups:
        return f"speed of {versus.title}: not timed"
    grid = {shape: speedups[shape] for shape in dict.fromkeys(r.shape for r in rows if r.grid) if shape in speedups}
    where, what = (grid, "of the grid") if grid else (speedups, "outside of the grid")
    worst = min(where, key=lambda shape: where[shape])
    every = len({row.shape for row in rows if row.grid == bool(grid)})
    of = "" if len(where) == every else f" of {every}"
    return (
        f"speed of {versus.title}: {formatting.speedup(geometric_mean(list(where.values())))}, geometric mean over "
        f"{len(where)}{of} shapes {what}; worst {worst} {formatting.speedup(where[worst])}"
    )


def by_shape(rows: Sequence[Row]) -> dict[str, dict[str, Row]]:
    """Group rows by shape, then by backend."""
    cells: dict[str, dict[str, Row]] = {}
    for row in rows:
        cells.setdefault(row.shape, {})[row.backend] = row
    return cells


def select_group(rows: Sequence[Row], group: str) -> list[Row]:
    """Return the rows with a shape name that starts with ``group``."""
    return [row for row in rows if row.shape.startswith(group)]


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
    rows: dict[str, list[Row]] = {}
    for group, unit in (("decode", "TB/s of K and V"), ("prefill", "TFLOP/s")):
        for row in select_group(record.rows, f"{group}_"):
            if rate(record, row) is not None:
                rows.setdefault(f"{group}, heads {heads(row.dims)}: {unit}", []).append(row)
    return list(rows.items())


def _rated_columns(record: Benchmark, rows: Sequence[Row]) -> list[BackendFacts]:
    """Return the backends with a rate on one of these rows."""
    names = {row.backend for row in rows if rate(record, row) is not None}
    return [c for c in record.backends if c.name in names]


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


def _format_speedups(speedups: Sequence[Mapping[str, float]], shape: str) -> list[str]:
    return [formatting.speedup(one[shape]) if shape in one else formatting.NONE for one in speedups]


def _decode(record: Benchmark) -> ServingTable:
    rows, read = select_group(record.rows, "decode_"), read_rate(record)
    shown = _rated_columns(record, rows)
    plans = [c for c in record.backends if c.name in ("plan", "vllm_fa3_plan") and not c.missing]
    titles, speedups = _ratio_columns(record, "decode_")
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
                *_format_speedups(speedups, shape),
                *(_micros(cells.get(c.name)) for c in plans),
            )
        )
    header = (*(c.label for c in shown), "of the read bandwidth", *titles, *(f"{c.label}, µs" for c in plans))
    of = f"; a reduction of 1 GiB reads {read:.2f} TB/s" if read else ""
    title = (
        "Decode, one query token for each sequence: µs (TB/s of the K and V attended to), caches beyond L2, pages of "
        f"64 tokens in random order; plans are made before the calls and are not included{of}"
    )
    return ServingTable(title, ("heads q:kv, head dim", "sequences x keys", *header), lines, len(header))


def _prefill(record: Benchmark) -> ServingTable:
    rows = select_group(record.rows, "prefill_")
    shown = _rated_columns(record, rows)
    titles, speedups = _ratio_columns(record, "prefill_")
    lines = []
    for shape, cells in by_shape(rows).items():
        first = next(iter(cells.values()))
        rates = [rate(record, row) if (row := cells.get(c.name)) else None for c in shown]
        values = [formatting.NONE if value is None else f"{value:.0f}" for value in rates]
        lines.append((heads(first.dims), short_name(shape), *values, *_format_speedups(speedups, shape)))
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
        "bytes. 64 tokens are in L2"
    )
    return ServingTable(title, ("heads q:kv, head dim", "tokens", "with", *header), lines, len(header))


#: Most names to list one by one.
_FEW = 4
#: Bytes that quantization moves per element: two read, one written.
_QUANTIZE_BYTES = 3


def reasons(record: Benchmark) -> list[str]:
    """Return the reasons of missing numbers: missing libraries, and failures with their shapes."""
    places: dict[tuple[str, str], list[str]] = {}
    everywhere = [(row.backend, row.reason, row.shape) for row in record.rows]
    everywhere += [
        (row.backend, row.reason, f"accuracy at {formatting.dims(row.dims)}, {row.inputs}") for row in record.accuracy
    ]
    for backend, reason, where in everywhere:
        if reason:
            places.setdefault((_label(record, backend), reason), []).append(where)
    missing = {(c.label, c.missing) for c in record.backends}
    return [
        f"{label}: {reason}"
        if (label, reason) in missing
        else f"{label} on {_listed(where)}: {formatting.without_folders(reason)}"
        for (label, reason), where in places.items()
    ]


def _listed(names: list[str]) -> str:
    """List a few names, or the number of names with the first and the last."""
    return ", ".join(names) if len(names) <= _FEW else f"{len(names)} shapes, {names[0]} to {names[-1]}"


def summary(record: Benchmark) -> str:
    """Format the headline, all tables, and the reasons of missing numbers."""
    by_inputs, by_length = ([r for r in record.accuracy if r.series == series] for series in ("inputs", "length"))
    parts = (
        f"{_capitalized(headline(record.rows, record.versus))}. {clocks_line(record)}".strip(),
        *(serving_tables(record) if record.comparison == "serving" else _attention_tables(record)),
        _host_table(record),
        _error_table(
            record, by_inputs, lambda row: (row.inputs, _sizes(row.dims)), lambda row: row.error,
            ("inputs", "B, H, S, D"),
            "Relative error of the output (Frobenius) against attention on the inputs before any rounding",
        ),
        _comparison_of_errors(record, by_inputs),
        _inputs_line(record),
        _error_table(
            record, by_length, lambda row: (str(row.dims["S"]),), lambda row: row.kernel_error, ("S",),
            "Error of the kernel alone, against exact arithmetic on the same codes, by length "
            + (f"(D={by_length[0].dims['D']}, one head, {by_length[0].sampled} of its query rows)" if by_length else "")
        ),
        formatting.bullets(reasons(record)),
    )  # fmt: skip
    return "\n\n".join(part for part in parts if part)


def _attention_tables(record: Benchmark) -> list[str]:
    grid, small = ([row for row in record.rows if row.grid == wanted] for wanted in (True, False))
    small_text = "Small shapes, µs per call; warm: a call's data are in L2 from the call before"
    return [
        _lengths_table(record, grid),
        _times_table(record, grid, _rate, "TFLOP/s, counted as 4·B·H·S²·D, half of it with a mask"),
        _times_table(record, small, _micros, small_text),
        _quantize_table(record),
    ]


def section(record: Benchmark, path: str, answer: Freshness | None = None) -> str:
    """Format provenance and summary for a page. A record of changed kernels gives no numbers."""
    if answer and answer.status == STALE:
        return f"The measurement in [{path}]({path}) is {answer}."
    own = f"greenfast {record.package_version}"
    versions = dict.fromkeys(c.version for c in record.backends if c.version not in ("", own))
    return (
        f"Measured: {record.what}, compared with other libraries, interleaved in one run on {facts.device(record)}; "
        f"{record.created[:10]}; commit {record.git.short}; {', '.join(versions)}; "
        f"[record]({path}).\n\n{summary(record)}"
    )


def benchmark_report(record: Benchmark, *, plot: str | None = None) -> str:
    """Format the whole report. plot: path of a figure of this record, relative to the report."""
    first, *others = sections(record)
    picture = [f"![throughput and times of all backends]({plot})"] if plot else []
    return document(title(record), [Section(first.title, [*picture, *first.parts]), *others])


def title(record: Benchmark) -> str:
    """Return the title of the report."""
    return f"{record.what}, compared with other libraries"


def sections(record: Benchmark) -> list[Section]:
    """Return the sections of the report, the summary first."""
    return [
        Section("Summary", [summary(record)]),
        Section("Gates", [gates(record)]),
        Section("Times", [_samples_table(record)]),
        *([Section("Compiler resources", [resource_table(record)])] if record.side else []),
        *provenance(record),
    ]


def clocks_line(record: Benchmark) -> str:
    """Format the range of clocks and temperatures, if the driver reports them: a hot board is slower."""
    ranges = [
        f"{name} {record.clocks[f'{key}_min']:.0f} to {record.clocks[f'{key}_max']:.0f} {unit}"
        for key, name, unit in (("sm_mhz", "SM clock", "MHz"), ("temperature_c", "temperature", "°C"))
        if f"{key}_min" in record.clocks
    ]
    return f"{', '.join(ranges)}." if ranges else ""


def _samples_table(record: Benchmark) -> str:
    """Format every backend on every shape, with the spread of its rounds and the clocks."""
    numbers = ("median µs", "p25 µs", "p75 µs", "TFLOP/s", "error", "kernel error")
    lines = [
        (
            row.shape,
            _label(record, row.backend),
            *(
                formatting.NONE if us is None else formatting.micros(us)
                for us in (row.median_us, row.p25_us, row.p75_us)
            ),
            formatting.NONE if row.tflops is None else f"{row.tflops:.1f}",
            formatting.error(row.error),
            formatting.error(row.kernel_error),
            f"{row.rounds} x {row.calls}" if row.rounds else formatting.NONE,
            row.cache,
            ", ".join(f"{name} {value:.0f}" for name, value in row.clocks.items()),
            row.reason,
        )
        for row in record.rows
    ]
    header = ("shape", "contender", *numbers, "rounds x calls", "L2", "clocks", "reason")
    return (
        f"{formatting.table(header, lines, right=numbers)}\n\nA time is for one replay of a captured CUDA graph of N "
        "calls, divided by N; a round replays each backend's graph once, in a rotating order. Inputs are drawn "
        "from N(0, 1) on the GPU by a torch.Generator with seed 0; codes and bfloat16 values are "
        "made of them before the timing. error: relative (Frobenius), against attention in float64 on the draw, over "
        "rows of every head; kernel error: against exact arithmetic on the codes, for backends that read them."
    )


def _label(record: Benchmark, name: str) -> str:
    return next((c.label for c in record.backends if c.name == name), name)


def _columns(record: Benchmark, rows: Sequence[Row]) -> list[BackendFacts]:
    """Return the backends of these rows with a whole attention or a reason."""
    names = {row.backend for row in rows if row.tflops is not None or row.reason}
    return [c for c in record.backends if c.name in names]


def _capitalized(text: str) -> str:
    return text[:1].upper() + text[1:]


def _sizes(dims: Mapping[str, int]) -> str:
    return ", ".join(str(dims[name]) for name in "BHSD")


def _rate(row: Row | None) -> str:
    return formatting.NONE if row is None or row.tflops is None else f"{row.tflops:.0f}"


def _micros(row: Row | None) -> str:
    return formatting.NONE if row is None or row.median_us is None else formatting.micros(row.median_us)


def _times_table(record: Benchmark, rows: Sequence[Row], value: Callable[[Row | None], str], text: str) -> str:
    """Format a row per shape with a value per backend and the ratios; empty without rows."""
    if not rows:
        return ""
    shown, speedups = _columns(record, rows), [ratios(rows, versus) for versus in record.versus]
    lines = []
    for shape, cells in by_shape(rows).items():
        first = next(iter(cells.values()))
        where = [_sizes(first.dims), "causal" if first.dims.get("CAUSAL") else "full"]
        if not first.grid:
            where = [f"{shape} ({where[0]})", first.cache]
        lines.append((*where, *(value(cells.get(c.name)) for c in shown), *_format_speedups(speedups, shape)))
    numbers = [*(c.label for c in shown), *(versus.title for versus in record.versus)]
    lead = ("B, H, S, D", "mask") if rows[0].grid else ("shape (B, H, S, D)", "L2")
    return f"{text}:\n\n{formatting.table((*lead, *numbers), lines, right=numbers)}"


def _lengths_table(record: Benchmark, rows: Sequence[Row]) -> str:
    """Format the ratios by length and mask, as geometric means over head dims."""
    if not rows:
        return ""
    of = {row.shape: (row.dims["S"], row.dims.get("CAUSAL", 0)) for row in rows}
    head_dims = ", ".join(map(str, sorted({row.dims["D"] for row in rows})))
    cells: dict[tuple[int, str], list[float]] = {}
    for versus in record.versus:
        for shape, ratio in ratios(rows, versus).items():
            length, causal = of[shape]
            cells.setdefault((length, f"{versus.title}, {'causal' if causal else 'full'}"), []).append(ratio)
    names = list(dict.fromkeys(name for _, name in cells))
    lines = [
        (
            str(s),
            *(formatting.speedup(geometric_mean(cells[s, n])) if (s, n) in cells else formatting.NONE for n in names),
        )
        for s in dict.fromkeys(length for length, _ in of.values())
    ]
    table = formatting.table(("S", *names), lines, right=names)
    return f"Speed by length and mask, geometric mean over head dims {head_dims}:\n\n{table}"


def _quantize_table(record: Benchmark) -> str:
    """Format the bandwidth of quantization, at three bytes per element, and of a copy of as many bytes."""
    lines = []
    for cells in by_shape(record.rows).values():
        row, copy = cells.get("quantize_fp8"), cells.get("copy")
        if row is None or row.median_us is None or row.dims.get("CAUSAL"):
            continue
        rate = _QUANTIZE_BYTES * 3 * math.prod(row.dims[d] for d in "BHSD") / row.median_us / 1e6
        share = f"{100 * copy.median_us / row.median_us:.0f} %" if copy and copy.median_us else formatting.NONE
        lines.append((_sizes(row.dims), formatting.micros(row.median_us), f"{rate:.2f}", share))
    if not lines:
        return ""
    header = ("B, H, S, D", "µs", "TB/s", "of a copy's bandwidth")
    return (
        "Quantization of Q, K and V alone, counting the three bytes that each element must move, and a copy of as "
        f"many:\n\n{formatting.table(header, lines, right=header[1:])}"
    )


def _host_table(record: Benchmark) -> str:
    if not record.host:
        return ""
    header = ("contender", "median µs", "least µs")
    lines = [(_label(record, r.backend), f"{r.median_us:.1f}", f"{r.least_us:.1f}") for r in record.host]
    return (
        f"Host time of an eager call at {formatting.dims(record.host[0].dims)}:\n\n"
        f"{formatting.table(header, lines, right=header[1:])}"
    )


def _error_table(
    record: Benchmark, rows: Sequence[AccuracyRow], key: Callable[[AccuracyRow], tuple[str, ...]],
    value: Callable[[AccuracyRow], float | None], header: tuple[str, ...], text: str,
) -> str:  # fmt: skip
    """Format errors with a column per backend; empty without rows."""
    if not rows:
        return ""
    errors = {(key(row), row.backend): value(row) for row in rows}
    shown = [c for c in record.backends if c.name in {row.backend for row in rows}]
    keys = dict.fromkeys(map(key, rows))
    lines = [(*cells, *(formatting.error(errors.get((cells, c.name))) for c in shown)) for cells in keys]
    labels = [c.label for c in shown]
    return f"{text}:\n\n{formatting.table((*header, *labels), lines, right=labels)}"


def _comparison_of_errors(record: Benchmark, rows: Sequence[AccuracyRow]) -> str:
    """Compare the errors of greenfast.sdpa with other 8-bit backends, by precision; empty without errors."""
    errors: dict[str, dict[str, float]] = {}
    for row in rows:
        if row.error is not None:
            errors.setdefault(f"{row.inputs} at {_sizes(row.dims)}", {})[row.backend] = row.error
    lines = []
    for name in (name for name in record.own if name.startswith("sdpa")):
        for precision in ("fp8", "int8"):
            peers = [
                c for c in record.backends
                if c.precision == precision and c.name not in record.own and any(c.name in of for of in errors.values())
            ]  # fmt: skip
            times = {
                at: of[name] / min(of[c.name] for c in peers if of.get(c.name))
                for at, of in errors.items()
                if of.get(name) and any(of.get(c.name) for c in peers)
            }
            if times:
                worst = max(times, key=lambda at: times[at])
                fine = sum(ratio <= 1 for ratio in times.values())
                lines.append(
                    f"- {_label(record, name)} errs no more than {' and '.join(c.label for c in peers)} on {fine} of "
                    f"{len(times)} rows; at most {times[worst]:.2f}x, on {worst}."
                )
    return "\n".join(lines)


def _inputs_line(record: Benchmark) -> str:
    kinds = [f"*{kind}* {text}" for kind, text in record.inputs.items() if kind != "normal"]
    return f"Inputs are N(0, 1), or {'; '.join(kinds)}." if kinds else ""


def models_table(records: Sequence[Mapping[str, Any]]) -> str:
    """Format the records of models.py: milliseconds by model and attention, and the errors of the attention."""
    rows = []
    for record in records:
        plain = {run["model"]: run["median_ms"] for run in record["runs"] if run["attention"] == "torch"}
        for run in record["runs"]:
            gain = plain[run["model"]] / run["median_ms"]
            compiled = ", compiled" if run.get("compiled") else ""
            share = f"{run['share']:.0%}" if run.get("share") else "-"
            rows.append(
                (f"{run['model']}{compiled}", f"{run['tokens']:,}", run["attention"], f"{run['median_ms']:.2f}",
                 f"{gain:.3f}x", share, str(run["taken"]), ", ".join(f"{e:.4f}" for e in run["errors"]) or "-",
                 f"{run['difference']:.4f}")
            )  # fmt: skip
    header = (
        "model", "tokens", "attention", "ms", "speed", "share of attention", "calls routed", "errors of attention",
        "output differs by",
    )  # fmt: skip
    return _sourced_table(header, rows, records)


def batching_table(records: Sequence[Mapping[str, Any]]) -> str:
    """Format the records of continuous_batching.py: tokens per second by model and attention."""
    rows = []
    for record in records:
        for run in record["runs"]:
            checks = ["-", "-"]
            if "agreement" in run:
                checks = [f"{100 * run['agreement']:.0f} %", f"{run['logprob_error']:.4f}"]
            rows.append(
                (run["model"], run["attention"], f"{run['requests']} of {run['prompt_tokens']:,} tokens",
                 f"{run['tokens_per_s']:.0f}",
                 f"{run['attention_ms']:.0f} of {run['kernels_ms']:.0f}" if run["kernels_ms"] else "-",
                 f"{run['peak_gib']:.1f}", *checks)
            )  # fmt: skip
    header = (
        "model", "attention", "prompts", "new tokens/s", "ms of attention, of all kernels", "peak GiB",
        "tokens that bf16 would choose", "log-probabilities off by",
    )  # fmt: skip
    return _sourced_table(header, rows, records)


def _sourced_table(header: Sequence[str], rows: Sequence[Sequence[str]], records: Sequence[Mapping[str, Any]]) -> str:
    """Format a table, and where each of its records was measured."""
    sources = []
    for record in records:
        names = (n for n in ("torch", "diffusers", "transformers") if n in record["environment"])
        versions = ", ".join(f"{name} {record['environment'][name]}" for name in names)
        commit = record["git"]["sha"][:10]
        sources.append(f"Measured on {record['device']['name']}; commit {commit}; {versions}.")
    return "\n\n".join([formatting.table(header, rows), *dict.fromkeys(sources)])

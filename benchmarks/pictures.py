"""Draw comparisons: their figure, their HTML page, and the picture and table of README.md."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from benchmarks.records import BackendFacts, Benchmark, Row, SpeedupPair
from benchmarks.report import clocks_line, headline, rate, ratios, reasons, sections, short_name, title
from benchmarks.report import panels as serving_panels
from greenfast.judge.report import facts, formatting
from greenfast.judge.report.formatting import Section
from greenfast.judge.report.plots import clean, render_svg
from greenfast.judge.report.webpage.page import bullets, figure, page
from greenfast.judge.report.webpage.run import details, gates, identity, limits, repeat

# Okabe and Ito's colours: distinct ones for greenfast, similar ones for other libraries of one precision.
_OWN = ("#D55E00", "#E69F00", "#CC79A7")
_OTHERS = {"fp8": ("#0072B2", "#56B4E9"), "bf16": ("#777777", "#AAAAAA", "#CCCCCC")}
#: Inches of the figure.
PLOT_WIDTH = 13
_WIDTH = 0.8  # of a shape's bars together


def save_benchmark_plot(record: Benchmark, path: Path) -> None:
    """Write the figure as PNG or SVG, by the path's suffix: a panel per head dim of the grid, and one of small shapes.

    Serving has a panel per number of heads. The first ratio of a shape's group is written above its bars. Raises
    ValueError for another suffix, OSError if the file cannot be written.
    """
    if path.suffix not in (".png", ".svg"):
        raise ValueError(f"a plot is .png or .svg, got {path.name!r}")
    figure = Figure(figsize=(PLOT_WIDTH, plot_height(record)), layout="constrained")
    FigureCanvasAgg(figure)
    draw_benchmark(figure, record)
    figure.savefig(path, dpi=120)


def plot_height(record: Benchmark) -> float:
    """Return the height of the figure in inches."""
    return max(2.5, 1.0 + 2.7 * len(_panels(record)))


def draw_benchmark(figure: Figure, record: Benchmark) -> None:
    """Draw the panels into an empty figure."""
    panels = _panels(record)
    provenance = f"{facts.device(record)}, commit {record.git.short}"
    figure.suptitle(f"{headline(record.rows, record.versus[:1])}\n{provenance}", fontsize=12)
    colors = _colors(record, {row.backend for _, rows, _ in panels for row in rows})
    first = {v.group: v for v in reversed(record.versus)}
    speedups = {shape: ratio for v in first.values() for shape, ratio in ratios(record.rows, v).items()}
    for i, (heading, rows, value) in enumerate(panels):
        names = {row.backend for row in rows}
        shown = [pair for pair in colors if pair[0].name in names]
        _draw_panel(figure.add_subplot(len(panels), 1, i + 1), heading, rows, shown, value, speedups)
    if panels:
        drawn = [axes.get_legend_handles_labels() for axes in figure.axes]
        by_label = {label: handle for pair in drawn for handle, label in zip(*pair, strict=True)}
        labels = [c.label for c, _ in colors]
        handles = [by_label[label] for label in labels]
        figure.legend(
            handles, labels, loc="outside lower center", ncols=min(5, len(labels)), fontsize=10, frameon=False
        )
    else:
        figure.text(0.5, 0.3, "nothing was timed", ha="center", fontsize=14)


Value = Callable[[Row], float | None]


def _panels(record: Benchmark) -> list[tuple[str, list[Row], Value]]:
    """Return for each panel its title, its rows and the value to draw."""
    if record.comparison == "serving":
        return [(title, rows, lambda row: rate(record, row)) for title, rows in serving_panels(record)]
    timed = [row for row in record.rows if row.tflops is not None]
    grid = [row for row in timed if row.grid]
    panels: list[tuple[str, list[Row], Value]] = [
        (f"head dim {d}: TFLOP/s", [row for row in grid if row.dims["D"] == d], _tflops)
        for d in sorted({row.dims["D"] for row in grid})
    ]
    small = [row for row in timed if not row.grid]
    return [*panels, ("small shapes: µs per call", small, _micros)] if small else panels


def _tflops(row: Row) -> float | None:
    return row.tflops


def _micros(row: Row) -> float | None:
    return row.median_us


def _colors(record: Benchmark, names: set[str]) -> list[tuple[BackendFacts, str]]:
    """Return the timed backends with their colours."""
    own, others = iter(_OWN), {precision: iter(colors) for precision, colors in _OTHERS.items()}
    return [
        (c, next(own if c.name in record.own else others.get(c.precision, iter(())), "#000000"))
        for c in record.backends
        if c.name in names
    ]


def _draw_panel(
    axes: Axes, title: str, rows: Sequence[Row], colors: Sequence[tuple[BackendFacts, str]], value: Value,
    speedups: dict[str, float],
) -> None:  # fmt: skip
    shapes = list(dict.fromkeys(row.shape for row in rows))
    width = _WIDTH / len(colors)
    tallest = dict.fromkeys(shapes, 0.0)
    for n, (backend, color) in enumerate(colors):
        heights = {row.shape: value(row) or 0.0 for row in rows if row.backend == backend.name}
        at = [i + (n + 0.5) * width - _WIDTH / 2 for i, shape in enumerate(shapes) if shape in heights]
        axes.bar(at, [heights[s] for s in shapes if s in heights], width * 0.95, color=color, label=backend.label)
        for shape, height in heights.items():
            tallest[shape] = max(tallest[shape], height)
    for i, shape in enumerate(shapes):
        if shape in speedups:
            axes.annotate(
                formatting.speedup(speedups[shape]), (i, tallest[shape]), (0, 3), textcoords="offset points",
                ha="center", fontsize=10,
            )  # fmt: skip
    axes.set_xticks(range(len(shapes)), [_name(row) for row in {row.shape: row for row in rows}.values()])
    axes.set_title(title, fontsize=11, loc="left")
    axes.margins(y=0.15)
    clean(axes)
    axes.grid(visible=False, axis="x")


def _name(row: Row) -> str:
    if not row.grid:
        return row.shape
    if "KEYS" in row.dims:
        return short_name(row.shape)
    return f"S {row.dims['S']}{', causal' if row.dims.get('CAUSAL') else ''}"


def benchmark_page(record: Benchmark, sha256: str = "") -> str:
    """Render the page of a record. sha256: of its file."""
    summary, *others = sections(record)
    picture = render_svg(
        "throughput and times of all backends",
        plot_height(record),
        lambda figure: draw_benchmark(figure, record),
        width=PLOT_WIDTH,
    )
    missing = reasons(record)
    return page(
        title(record),
        [
            Section("Times", [figure(picture, clocks_line(record)), *summary.parts]),
            *([Section("Gates", gates(record))] if record.gates else []),
            Section("Repeat it", repeat(record)),
            Section("Limits", [bullets([*missing, *limits(record)])]),
            Section("The whole record", details(others)),
        ],
        claims=[f"{said[:1].upper()}{said[1:]}." for said in (headline(record.rows, [v]) for v in record.versus)],
        facts=identity(record, sha256),
    )


#: In the picture's metadata: the prefix of the digest of the numbers that it shows.
DESCRIPTION = "numbers: sha256 "
#: The head dim and mask of the picture; the table and docs/results.md hold the others.
_HEAD_DIM, _CAUSAL = 128, 1

Series = dict[str, dict[int, float]]  # label -> length -> TFLOP/s

# Okabe and Ito's colours: greenfast stands out, the others of a precision have similar colours.
_COLORS = {
    "greenfast FP8": "#D55E00",
    "FlashAttention-3 FP8": "#0072B2",
    "cuDNN FP8": "#56B4E9",
    "FlashAttention-3 bf16": "#444444",
    "PyTorch cuDNN bf16": "#888888",
    "PyTorch flash (FA2) bf16": "#C4C4C4",
}
_TORCH = {"torch_cudnn": "PyTorch cuDNN bf16", "torch_flash": "PyTorch flash (FA2) bf16"}
_BF16 = {"fa3_bf16": "FlashAttention-3 bf16", **_TORCH}
_CALLS = {"sdpa_fp8": "greenfast FP8", **_BF16}
_KERNELS = {"greenfast": "greenfast FP8", "fa3": "FlashAttention-3 FP8", "cudnn": "cuDNN FP8", **_TORCH}


def _shown(dims: Mapping[str, int]) -> bool:
    return dims["D"] == _HEAD_DIM and dims.get("CAUSAL", 0) == _CAUSAL


def operator_series(record: Benchmark) -> Series:
    """Return the rates of whole calls on bfloat16 tensors."""
    return _series(record, _CALLS)


def kernel_series(record: Benchmark) -> Series:
    """Return the rates of kernels alone, the FP8 ones on precomputed codes."""
    return _series(record, _KERNELS)


def _series(record: Benchmark, labels: Mapping[str, str]) -> Series:
    series: Series = {label: {} for label in labels.values()}
    for row in record.rows:
        if row.grid and row.tflops is not None and row.backend in labels and _shown(row.dims):
            series[labels[row.backend]][row.dims["S"]] = row.tflops
    return series


def digest_numbers(operator: Benchmark, peers: Benchmark) -> str:
    """Return the digest of the picture's numbers and caption."""
    shown = [operator_series(operator), kernel_series(peers), _caption(operator, peers)]
    return hashlib.sha256(json.dumps(shown).encode()).hexdigest()


def _caption(operator: Benchmark, peers: Benchmark) -> str:
    return (
        f"head dim {_HEAD_DIM}, {'causal' if _CAUSAL else 'no'} mask, 16,384 tokens, forward; "
        f"left: {facts.device(operator)}, {operator.created[:10]}; right: {facts.device(peers)}, {peers.created[:10]}"
    )


def draw_speed(operator: Benchmark, peers: Benchmark) -> str:
    """Draw the picture of README.md as SVG."""
    digest = digest_numbers(operator, peers)
    with rc_context({"svg.hashsalt": digest, "font.size": 10}):
        figure = Figure(figsize=(10, 4.5), layout="constrained")
        FigureCanvasSVG(figure)
        left, right = figure.subplots(1, 2, sharey=True)
        _draw(left, operator_series(operator), "Whole call on bf16 tensors (FP8: quantization included)")
        _draw(right, kernel_series(peers), "Kernel alone: FP8 on codes, bf16 on tensors")
        left.set_ylabel("TFLOP/s (higher is better)")
        shown = {
            label: handle
            for axes in (right, left)
            for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
        }
        shown = {label: shown[label] for label in _COLORS}
        figure.legend(shown.values(), shown, loc="outside upper center", ncols=3, frameon=False)
        figure.supxlabel(f"sequence length; {_caption(operator, peers)}", fontsize=9)
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata={"Date": None, "Description": f"{DESCRIPTION}{digest}"})
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines()) + "\n"


def _draw(axes: Axes, series: Series, title: str) -> None:
    lengths = sorted({length for values in series.values() for length in values})
    width = 0.85 / len(series)
    for n, (label, values) in enumerate(series.items()):
        at = [lengths.index(length) + (n + 0.5) * width - 0.425 for length in values]
        bars = axes.bar(at, list(values.values()), width * 0.94, color=_COLORS[label], label=label)
        axes.bar_label(bars, [f"{value:.0f}" for value in values.values()], fontsize=7, padding=1)
    axes.set_xticks(range(len(lengths)), [str(length) for length in lengths])
    axes.set_title(title, fontsize=10, loc="left")
    clean(axes)
    axes.grid(visible=False, axis="x")


def format_gains(record: Benchmark) -> str:
    """Format the speedup of ``sdpa`` in FP8 over the fastest bfloat16 library, by length and head dim."""
    gains: dict[int, dict[tuple[int, int], str]] = {}
    dims = {row.shape: row.dims for row in record.rows}
    for shape, ratio in ratios(record.rows, SpeedupPair(own="sdpa_fp8", baselines=list(_BF16), title="")).items():
        at = dims[shape]
        gains.setdefault(at["S"], {})[at["D"], at.get("CAUSAL", 0)] = f"{ratio:.2f}x"
    head_dims = sorted({head_dim for cells in gains.values() for head_dim, _ in cells})
    header = ("sequence length", *(f"head dim {d}" for d in head_dims))
    rows: Sequence[Sequence[str]] = [
        (str(length), *(f"{cells[d, 0]} / {cells[d, 1]}" for d in head_dims)) for length, cells in gains.items()
    ]
    return formatting.table(header, rows, right=header)

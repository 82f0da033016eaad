"""Draw a comparison as one figure: throughput on the grid, time on the small shapes, rates of serving."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from benchmarks.ratios import headline, ratios
from benchmarks.record_schema import BackendFacts, Benchmark, Row
from benchmarks.serving_report import panels as serving_panels
from benchmarks.serving_report import rate, short_name
from greenfast.judge.report import facts, formatting
from greenfast.judge.report.plots import clean

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
    provenance = f"{facts.device(record)}, commit {facts.commit(record)}"
    figure.suptitle(f"{headline(record.rows, record.versus[:1])}\n{provenance}", fontsize=12)
    colors = _colors(record, {row.backend for _, rows, _ in panels for row in rows})
    first = {v.group: v for v in reversed(record.versus)}
    found = {shape: ratio for v in first.values() for shape, ratio in ratios(record.rows, v).items()}
    for i, (title, rows, value) in enumerate(panels):
        names = {row.backend for row in rows}
        shown = [pair for pair in colors if pair[0].name in names]
        _draw(figure.add_subplot(len(panels), 1, i + 1), title, rows, shown, value, found)
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
    found: list[tuple[str, list[Row], Value]] = [
        (f"head dim {d}: TFLOP/s", [row for row in grid if row.dims["D"] == d], _tflops)
        for d in sorted({row.dims["D"] for row in grid})
    ]
    small = [row for row in timed if not row.grid]
    return [*found, ("small shapes: µs per call", small, _micros)] if small else found


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


def _draw(
    axes: Axes, title: str, rows: Sequence[Row], colors: Sequence[tuple[BackendFacts, str]], value: Value,
    found: dict[str, float],
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
        if shape in found:
            axes.annotate(
                formatting.speedup(found[shape]), (i, tallest[shape]), (0, 3), textcoords="offset points", ha="center",
                fontsize=10,
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

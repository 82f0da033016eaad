"""The comparison with peers as one figure: throughput on the grid, time on the small shapes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from greenfast.judge.peers import OWN, PeerContender, PeerRow
from greenfast.judge.record import PeersRecord
from greenfast.judge.report import facts, format
from greenfast.judge.report.peers import headline, ratios
from greenfast.judge.report.plots import clean

# Okabe and Ito's colours: the own kernel stands out, the peers of a precision are near each other.
_OWN = "#D55E00"
_PEERS = {"fp8": ("#0072B2", "#56B4E9"), "bf16": ("#999999", "#CCCCCC")}
_WIDTH = 0.8  # of a shape's bars together


def save_peers_plot(record: PeersRecord, path: Path) -> None:
    """Write the figure as PNG or SVG, by the path's suffix: a panel per head dim of the grid, and one of small shapes.

    Above each shape's bars stands greenfast's speed over that of the better FP8 peer. Raises ValueError for another
    suffix, OSError where the file cannot be written.
    """
    if path.suffix not in (".png", ".svg"):
        raise ValueError(f"a plot is .png or .svg, got {path.name!r}")
    timed = [row for row in record.rows if row.median_us is not None]
    names = {row.contender for row in timed}
    contenders = [c for c in record.contenders if c.name in names]
    grid = [row for row in timed if row.grid]
    panels = [
        (f"head dim {d}: TFLOP/s", [row for row in grid if row.dims["D"] == d], "tflops")
        for d in sorted({row.dims["D"] for row in grid})
    ]
    small = [row for row in timed if not row.grid]
    if small:
        panels.append(("small shapes: µs per call", small, "median_us"))
    figure = Figure(figsize=(13, max(2.5, 1.0 + 2.7 * len(panels))), layout="constrained")
    FigureCanvasAgg(figure)
    where = f"{facts.device(record)}, commit {facts.commit(record)}"
    figure.suptitle(f"{headline(record.rows, record.contenders)}\n{where}", fontsize=12)
    found = ratios(record.rows, record.contenders)
    for i, (title, rows, value) in enumerate(panels):
        _draw(figure.add_subplot(len(panels), 1, i + 1), title, rows, contenders, value, found)
    if panels:
        handles, labels = figure.axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), fontsize=10, frameon=False)
    else:
        figure.text(0.5, 0.3, "nothing was timed", ha="center", fontsize=14)
    figure.savefig(path, dpi=120)


def _draw(
    axes: Axes,
    title: str,
    rows: Sequence[PeerRow],
    contenders: Sequence[PeerContender],
    value: str,
    found: dict[str, float],
) -> None:
    shapes = list(dict.fromkeys(row.shape for row in rows))
    width = _WIDTH / len(contenders)
    colors = {precision: iter(pair) for precision, pair in _PEERS.items()}
    tallest = dict.fromkeys(shapes, 0.0)
    for n, contender in enumerate(contenders):
        heights = {row.shape: getattr(row, value) for row in rows if row.contender == contender.name}
        at = [i + (n + 0.5) * width - _WIDTH / 2 for i, shape in enumerate(shapes) if shape in heights]
        color = _OWN if contender.name == OWN else next(colors[contender.precision], "#000000")
        axes.bar(at, [heights[s] for s in shapes if s in heights], width * 0.95, color=color, label=contender.label)
        for shape, height in heights.items():
            tallest[shape] = max(tallest[shape], height)
    for i, shape in enumerate(shapes):
        if shape in found:
            axes.annotate(
                format.speedup(found[shape]), (i, tallest[shape]), (0, 3), textcoords="offset points", ha="center",
                fontsize=10,
            )  # fmt: skip
    axes.set_xticks(range(len(shapes)), [_name(row) for row in {row.shape: row for row in rows}.values()])
    axes.set_title(title, fontsize=11, loc="left")
    axes.margins(y=0.15)
    clean(axes)
    axes.grid(visible=False, axis="x")


def _name(row: PeerRow) -> str:
    if not row.grid:
        return row.shape
    return f"S {row.dims['S']}{', causal' if row.dims.get('CAUSAL') else ''}"

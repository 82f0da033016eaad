"""The picture and tables of docs/parallel.md, from the model ``greenfast.parallel.cost`` and the kept runs."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from benchmarks.parallel_backends import BACKENDS
from benchmarks.records import CaseRow, read_parallel
from greenfast.judge.report import formatting
from greenfast.parallel import cost

HEADS, HEAD_DIM = 32, 128
_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
_LENGTHS = {131072: ("128k", "#0072B2"), 1 << 20: ("1M", "#D55E00"), 1 << 23: ("8M", "#444444")}
#: TFLOP/s of each GPU, 0 where none were named, and the share of exchanges that nothing hides.
_AIMS = {
    "32k_causal": (800, 0.08), "131k_causal": (880, 0.02), "32k_full": (930, 0.08), "131k_full": (930, 0.02),
    "32k_causal_gqa8": (0, 0.08),
}  # fmt: skip
_METHODS = {"ring": (cost.estimate_ring, "-"), "ulysses": (cost.estimate_ulysses, "--")}


def sizes(size: int, rows: int) -> cost.CallSizes:
    """Return the sizes of a causal attention on ``size`` ranks."""
    each = rows // size
    return cost.CallSizes(size, 1, HEADS, HEADS, each, each, HEAD_DIM, True)


def rate(method: str, size: int, rows: int) -> float:
    """Return TFLOP/s of each GPU by the model."""
    of = sizes(size, rows)
    return of.flops / _METHODS[method][0](of).seconds / 1e12


def read_rows(root: Path) -> list[CaseRow]:
    """Read the rows of two GPUs of all kept runs."""
    kept_records = [read_parallel(path) for path in sorted((root / "evidence").glob("parallel-*.json"))]
    return [row for record in kept_records if record.ranks == 2 for row in record.rows]


def draw(rows: Sequence[CaseRow]) -> Figure:
    """Draw the figure: rates by the number of GPUs, and by the length of the sequence on two of them."""
    figure = Figure(figsize=(9.6, 3.8), layout="constrained")
    scaling, two = figure.subplots(1, 2)
    for length, (name, color) in _LENGTHS.items():
        for method, (_, line) in _METHODS.items():
            shown = [n for n in _SIZES if _sensible(method, n, length)]
            y = [rate(method, n, length) for n in shown]
            scaling.plot(shown, y, line, color=color, label=f"{name}, {method}")
    scaling.axvline(8, color="#bbbbbb", linewidth=0.8)
    scaling.annotate("one node", (8, 20), xytext=(4, 0), textcoords="offset points", color="#777777")
    scaling.set_xscale("log", base=2)
    scaling.set_xticks([1, 2, 4, 8, 64, 1024], ["1", "2", "4", "8", "64", "1024"])
    _axes(scaling, "GPUs", "Model: one sequence on more GPUs")
    lengths = [4096 << i for i in range(7)]
    for method, (_, line) in _METHODS.items():
        two.plot(lengths, [rate(method, 2, n) for n in lengths], line, color="#888888", label=f"model, {method}")
    marks = {"ring": ("o", "#D55E00"), "ulysses": ("s", "#D55E00"), "fa3": ("^", "#0072B2"), "torch": ("v", "#444444")}
    names = {"ring": "ring", "ulysses": "ulysses", "fa3": "FA3 bf16, ring", "torch": "PyTorch bf16, ring"}
    for name, (mark, color) in marks.items():
        own = [row for row in rows if row.backend == name and row.causal and row.dims["HK"] == HEADS]
        if own:
            points = [row.dims["S"] for row in own], [row.tflops for row in own]
            two.plot(*points, mark, color=color, label=f"measured, {names[name]}", markersize=6)
    two.set_xscale("log", base=2)
    two.set_xticks([4096, 16384, 65536, 262144], ["4k", "16k", "64k", "256k"])
    _axes(two, "rows of the sequence", "Two GPUs: model and runs")
    return figure


def _axes(axes: Axes, x: str, title: str) -> None:
    axes.set_title(title, fontsize=10, loc="left")
    axes.set_xlabel(x)
    axes.set_ylabel("TFLOP/s of each GPU, causal")
    axes.set_ylim(0, 1050)
    axes.grid(color="#e6e6e6", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=7.5, frameon=False, loc="lower left")


def model_table() -> str:
    """Format rates of some numbers of GPUs; a dash where there are fewer rows than a tile, or fewer heads."""
    columns = [(131072, "ring"), (131072, "ulysses"), (1 << 20, "ring"), (1 << 20, "ulysses"), (1 << 23, "ring")]
    names = [f"{_LENGTHS[n][0]} rows, {method}" for n, method in columns]
    rows = [
        (f"{size:,}", *(f"{rate(m, size, n):.0f}" if _sensible(m, size, n) else formatting.NONE for n, m in columns))
        for size in (2, 4, 8, 64, 1024)
    ]
    return formatting.table(("GPUs", *names), rows, right=("GPUs", *names))


def _sensible(method: str, size: int, length: int) -> bool:
    return length // size >= 1024 and (method == "ring" or size <= HEADS)


def measured_table(rows: Sequence[CaseRow]) -> str:
    """Format the runs on two GPUs."""
    header = ("case", "contender", "ms", "TFLOP/s per GPU", "error", "exposed", "idle", "MiB", "model, ms")
    lines = []
    for row in rows:
        shares = ["-" if x is None else f"{100 * x:.1f} %" for x in (row.exposed, row.idle)]
        error = f"{row.error:.4f}" if row.error else "-"
        model = "-" if row.model_ms is None else f"{row.model_ms:.2f}"
        cells = [f"{row.median_ms:.2f}", f"{row.tflops:.0f}", error, *shares, f"{row.peak_bytes / 2**20:.0f}", model]
        lines.append((row.case, BACKENDS[row.backend].label, *cells))
    return formatting.table(header, lines, right=header[2:])


def aims_table(measured: Sequence[CaseRow]) -> str:
    """Format the goals and the result of the faster method of greenfast in each case."""
    rows = {(row.case, row.backend): row for row in measured}
    header = (
        "case", "TFLOP/s: aim", "came", "by", "of PyTorch's best", "of FA3's ring", "of `alone`", "exposed: aim",
        "came", "model's time of ring's, ulysses'",
    )  # fmt: skip
    lines = []
    for case, (rate, exposed) in _AIMS.items():
        of = {name: row for (at, name), row in rows.items() if at == case}
        if not of:
            continue
        best = min((of[name] for name in _METHODS), key=lambda row: row.median_ms)
        theirs = min(of[name].median_ms for name in ("torch", "torch_alltoall"))
        ratios = [f"{x / best.median_ms:.2f}x" for x in (theirs, of["fa3"].median_ms, of["alone"].median_ms)]
        models = ", ".join(f"{(of[name].model_ms or 0) / of[name].median_ms:.0%}" for name in _METHODS)
        came = "-" if best.exposed is None else f"{best.exposed:.1%}"
        lines.append(
            (case, str(rate or "-"), f"{best.tflops:.0f}", best.backend, *ratios, f"{exposed:.0%}", came, models)
        )
    return formatting.table(header, lines, right=set(header) - {"case", "by"})


def picture(rows: Sequence[CaseRow]) -> str:
    """Return the SVG; the same bytes for the same numbers."""
    with rc_context({"svg.hashsalt": "greenfast", "svg.fonttype": "none", "font.size": 9}):
        out = io.StringIO()
        FigureCanvasSVG(draw(rows)).print_svg(out, metadata={"Date": None})  # type: ignore[no-untyped-call]
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"

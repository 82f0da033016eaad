"""Figures of a record: as a file, and as SVG in a page.

In a page, matplotlib draws the figures and the page colours them, so that they follow light and dark.
"""

from __future__ import annotations

import hashlib
import io
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from textwrap import shorten
from typing import Any

import numpy as np
from markupsafe import Markup
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle

from greenfast.judge.record_schema import CorrectnessRow, ErrorMap, Histogram, Record, Side, SpeedupRow, TimingRow
from greenfast.judge.report import facts, formatting
from greenfast.spec.errors import MachineError, UsageError

# Okabe and Ito's colours are distinct with every common colour blindness; markers differ too.
BASELINE = ("#0072B2", "o", "baseline")
CANDIDATE = ("#D55E00", "^", "candidate")
REQUIRED = "#009E73"
NOISE = "#BBBBBB"
MAX_PANELS = 4


def save_plot(record: Record, path: Path) -> None:
    """Write the figure as PNG or SVG, by the path's suffix; a record without speedups gives a figure with the reason.

    Left, a panel per deciding shape (at most 4): each block's median in microseconds, in the order of processes and
    blocks; marks in one column are of one interleaved block. Right: the speedups with their intervals, the requirement,
    and the band of the noise floor. Raises UsageError for another suffix, MachineError if the file cannot be written.
    """
    if path.suffix not in (".png", ".svg"):
        raise UsageError(f"--plot {path}: the name must end in .png or .svg")
    panels = facts.deciding_speedups(record.speedups)[:MAX_PANELS]
    height = max(4.6, 1.2 + 2.1 * len(panels), 1.9 + 0.62 * len(record.speedups)) if panels else 2.5
    figure = Figure(figsize=(13, height), layout="constrained")
    FigureCanvasAgg(figure)
    sides = f"{record.baseline.variant} -> {record.candidate.variant}"
    where = f"{record.task}, {record.format}, {facts.device(record)}, commit {record.git.short}"
    figure.suptitle(f"{sides}: {record.decision}\n{where}", fontsize=13)
    if panels:
        grid = figure.add_gridspec(len(panels), 2, width_ratios=(1.2, 1))
        for i, row in enumerate(panels):
            draw_blocks(figure.add_subplot(grid[i, 0]), record, row, last=i == len(panels) - 1)
        draw_forest(figure.add_subplot(grid[:, 1]), record.speedups)
        _draw_legend(figure, record)
    else:
        figure.text(
            0.5, 0.3, "not timed; " + shorten(facts.gate_line(record, "PERFORMANCE"), 120), ha="center", fontsize=14
        )
    try:
        figure.savefig(path, dpi=120)
    except OSError as e:
        raise MachineError(f"{path} cannot be written ({e.strerror})") from e


def _draw_legend(figure: Figure, record: Record) -> None:
    names = (record.baseline.variant, record.candidate.variant)
    handles = [
        Line2D([], [], color=color, marker=marker, linestyle="", label=f"{role}: {name}")
        for (color, marker, role), name in zip((BASELINE, CANDIDATE), names, strict=True)
    ]
    extra = [Line2D([], [], color=REQUIRED, linewidth=2, label="required"), Patch(color=NOISE, label="noise floor")]
    figure.legend(handles=[*handles, *extra], loc="outside lower center", ncols=4, fontsize=10, frameon=False)


def draw_blocks(
    axes: Axes,
    record: Record,
    row: SpeedupRow,
    *,
    last: bool,
    values: str = "block_medians_us",
    unit: str = "block median (µs)",
) -> None:
    """Draw both sides' block medians of one shape, a faint rule between processes, a name at each seed.

    values: the field of TimingRow that is drawn. last: whether the axes have the figure's label of blocks.
    """
    for side, (color, marker, _) in ((record.baseline, BASELINE), (record.candidate, CANDIDATE)):
        drawn = [value for _, _, block in _runs(side, row, values) for value in block]
        axes.plot(range(len(drawn)), drawn, color=color, marker=marker, markersize=3.5, linestyle="", alpha=0.8)
    start = 0
    seeds: set[int] = set()
    for seed, _, block in _runs(record.candidate, row, values):
        if start:
            axes.axvline(start - 0.5, color="0.6" if seed not in seeds else "0.88", linewidth=1)
        if seed not in seeds:
            axes.annotate(
                f"seed {seed}",
                (start, 1),
                xycoords=("data", "axes fraction"),
                xytext=(2, -11),
                textcoords="offset points",
                fontsize=9,
                color="0.35",
            )
            seeds.add(seed)
        start += len(block)
    axes.margins(x=0.01)
    bottom, top = axes.get_ylim()
    axes.set_ylim(max(0.0, bottom - 0.05 * (top - bottom)), top + 0.18 * (top - bottom))
    axes.set_title(
        formatting.short(f"{row.shape}, {row.cache}{_method(record.candidate, row)}", 70), fontsize=11, loc="left"
    )
    axes.set_ylabel(unit, fontsize=10)
    if last:
        axes.set_xlabel("interleaved blocks, by seed; thin lines part processes", fontsize=10)
    clean(axes)


def _runs(side: Side, row: SpeedupRow, values: str) -> Iterator[tuple[int, int, Sequence[float]]]:
    """Yield (seed, process, a value per block) in the order of the run."""
    for timing in facts.select_timing(side, row):
        for process, block in enumerate(getattr(timing, values)):
            yield timing.seed, process, block


def _method(side: Side, row: SpeedupRow) -> str:
    rows: list[TimingRow] = facts.select_timing(side, row)
    return f", timed by {rows[0].method}" if rows else ""


def draw_forest(axes: Axes, rows: Sequence[SpeedupRow]) -> None:
    """Draw a line per speedup: its interval, its noise band around 1, its requirement, its verdict in words."""
    axes.axvline(1, color="0.3", linewidth=1)
    for y, row in enumerate(rows):
        band = 1 / (1 + row.noise_floor)
        axes.add_patch(Rectangle((band, y - 0.4), 1 + row.noise_floor - band, 0.8, color=NOISE, linewidth=0))
        error = [[row.speedup - row.ci_low], [row.ci_high - row.speedup]]
        axes.errorbar([row.speedup], [y], xerr=error, color="black", marker="s", markersize=5, capsize=4, linewidth=1.8)
        if row.required:
            axes.plot([row.required] * 2, [y - 0.4, y + 0.4], color=REQUIRED, linewidth=2)
        text = f"{formatting.speedup(row.speedup)} {formatting.interval(row.ci_low, row.ci_high)}\n{row.verdict}"
        if row.required:
            text += f", required {formatting.requirement(row.required)}"
        # Outside the axes it covers no mark; the layout makes room.
        axes.text(1.02, y, text, transform=axes.get_yaxis_transform(), va="center", fontsize=10)
    axes.set_yticks(
        range(len(rows)),
        [
            f"{formatting.short(row.shape)}\n{formatting.short(row.cache)}{', gated' if row.gated else ''}"
            for row in rows
        ],
    )
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.margins(x=0.1)
    axes.set_title(f"speedup with {100 * rows[0].confidence:g} % interval", fontsize=11, loc="left")
    axes.set_xlabel("baseline time / candidate time", fontsize=10)
    clean(axes)


def clean(axes: Axes) -> None:
    """Remove the box of axes, and add a faint grid."""
    axes.tick_params(labelsize=10)
    axes.grid(axis="both", color="0.93")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


#: Inches; a phone shows it at two thirds of its size.
WIDTH = 6.8
# matplotlib's colours -> the page's.
_COLORS = {
    BASELINE[0].lower(): "baseline",
    CANDIDATE[0].lower(): "candidate",
    REQUIRED.lower(): "required",
    NOISE.lower(): "band",
    "#ffffff": "paper",
    "#000000": "ink",
    "#4c4c4c": "ink",
    "#595959": "soft",
    "#999999": "soft",
    "#e0e0e0": "line",
    "#ededed": "line",
}
_COLOR = re.compile(rf"((?:fill|stroke): )({'|'.join(_COLORS)})")
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",  # text stays text: small, and found by a search
    "font.sans-serif": ["DejaVu Sans"],
    "text.parse_math": False,  # a name may hold a $
    "axes.formatter.use_mathtext": False,
}


def render_svg(label: str, height: float, draw: Callable[[Figure], None], *, width: float = WIDTH) -> Markup:
    """Return the SVG of a figure that ``draw`` fills. The size is in inches.

    label: a description for readers without the picture.
    """
    salt = hashlib.sha256(label.encode()).hexdigest()[:12]
    with rc_context({**_STYLE, "svg.hashsalt": salt}):
        one = Figure(figsize=(width, height), layout="constrained")
        FigureCanvasSVG(one)
        draw(one)
        text = io.StringIO()
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        one.savefig(text, format="svg", metadata=nothing, transparent=True)
    body = text.getvalue()
    head, _, rest = body[body.index("<svg") :].partition(">")
    box = re.search(r'viewBox="[-\d. ]+"', head)
    rest = re.sub(r'<g id="[^"]*">', "<g>", rest)  # the same in every figure, and never referred to
    rest = _COLOR.sub(lambda match: f"{match[1]}var(--{_COLORS[match[2]]})", rest)
    wide = Markup(' class="wide"') if width > WIDTH else ""
    opening = Markup('<svg role="img"{} aria-label="{}" {}>').format(wide, label, Markup(box[0] if box else ""))
    return opening + Markup(rest)


def draw_speedups(rows: Sequence[SpeedupRow]) -> Markup:
    """Draw a line per speedup with its interval, the noise band and the requirement."""
    return render_svg(
        "speedups with their intervals, the noise band around 1 and the required speedup",
        1.0 + 0.5 * len(rows),
        lambda one: draw_forest(one.add_subplot(), rows),
    )


#: Field of TimingRow -> the axis under which it is drawn.
_BLOCK_VALUES = {"block_medians_us": "median, µs", "block_mhz": "SM clock, MHz", "block_watts": "power, W"}


def draw_medians(record: Record) -> Markup:
    """Draw every block's median for the deciding shapes (at most 4), with clock and power if the record has them."""
    panels = [
        (row, values, unit)
        for row in facts.deciding_speedups(record.speedups)[:MAX_PANELS]
        for values, unit in _BLOCK_VALUES.items()
        if _has(record, row, values)
    ]

    def draw(one: Figure) -> None:
        for i, (row, values, unit) in enumerate(panels):
            axes = one.add_subplot(len(panels), 1, i + 1)
            draw_blocks(axes, record, row, last=i == len(panels) - 1, values=values, unit=unit)
            if values != "block_medians_us":
                axes.set_title("", loc="left")
        handles = [
            Line2D([], [], color=color, marker=marker, linestyle="", label=formatting.short(f"{role}: {side.variant}"))
            for (color, marker, _), (role, side) in zip((BASELINE, CANDIDATE), record.sides(), strict=True)
        ]
        one.legend(handles=handles, loc="outside lower center", ncols=2, fontsize=10, frameon=False)

    return render_svg("medians of the interleaved blocks", 0.5 + 1.7 * max(1, len(panels)), draw)


def _has(record: Record, row: SpeedupRow, values: str) -> bool:
    sides = (record.baseline, record.candidate)
    return any(any(getattr(timing, values)) for side in sides for timing in facts.select_timing(side, row))


def draw_errors(rows: Sequence[tuple[str, CorrectnessRow]]) -> Markup:
    """Draw the distribution of elements' kernel errors, and below it the worst error of each row.

    rows: role and row, of the baseline and the candidate or of one side alone.
    """
    roles = list(dict.fromkeys(role for role, _ in rows))
    marks = dict(zip(roles, (BASELINE, CANDIDATE) if len(roles) > 1 else (CANDIDATE,), strict=False))
    panels: list[Callable[[Axes], None]] = []
    for field, title in (
        ("bound_histogram", "kernel error / what rounding explains"),
        ("error_histogram", "absolute kernel error"),
    ):
        histograms = {role: _joined([getattr(row, field) for name, row in rows if name == role]) for role in roles}
        if all(h is not None for h in histograms.values()):
            panels.append(lambda axes, histograms=histograms, title=title: _histograms(axes, histograms, marks, title))  # type: ignore[misc]
    panels.append(lambda axes: _worst(axes, rows, marks))

    def draw(one: Figure) -> None:
        for i, panel in enumerate(panels):
            panel(one.add_subplot(len(panels), 1, i + 1))

    return render_svg("distribution of errors", 0.3 + 2.1 * len(panels), draw)


_Marks = dict[str, tuple[str, str, str]]


def _joined(histograms: Sequence[Histogram | None]) -> Histogram | None:
    """Merge histograms; None if one is missing or has other bins."""
    first = next(iter(histograms), None)
    if first is None or len(first.counts) < 3 or first.per_decade < 1:
        return None
    total = np.zeros(len(first.counts), np.int64)
    for histogram in histograms:
        if histogram is None or (histogram.first, histogram.per_decade, len(histogram.counts)) != (
            first.first, first.per_decade, len(first.counts)
        ):  # fmt: skip
            return None
        total += np.asarray(histogram.counts, np.int64)
    return Histogram(first=first.first, per_decade=first.per_decade, counts=total.tolist())


def _histograms(axes: Axes, histograms: dict[str, Histogram], marks: _Marks, title: str) -> None:
    """Draw steps over log10 of the value. The outer bins contain the values beyond the edges."""
    widest: list[float] = []
    for role, histogram in histograms.items():
        color, _, _ = marks[role]
        total = sum(histogram.counts) or 1
        shares = 100 * np.asarray(histogram.counts) / total
        edges = histogram.first + np.arange(-1, len(shares)) / histogram.per_decade
        axes.stairs(shares, edges, color=color, linewidth=1.6, label=formatting.short(role), baseline=0)
        held = np.flatnonzero(shares)
        widest += [edges[held[0]], edges[held[-1] + 1]] if len(held) else []
    if widest:
        axes.set_xlim(min(widest) - 0.3, max(widest) + 0.3)
    if "rounding" in title:
        axes.axvline(0, color=REQUIRED, linewidth=1.5)
    _decades(axes)
    axes.set_ylim(bottom=0)
    axes.set_title(title, fontsize=11, loc="left")
    axes.set_ylabel("% of elements", fontsize=10)
    axes.legend(fontsize=10, frameon=False)
    clean(axes)


def _decades(axes: Axes) -> None:
    low, high = axes.get_xlim()
    step = max(1, round((high - low) / 8))
    ticks = range(int(np.ceil(low)), int(np.floor(high)) + 1, step)
    axes.set_xticks(list(ticks), [f"{10.0**tick:g}" for tick in ticks])


#: Steps of an error over the allowed error, and their colours: within half, within, up to ten times, and more.
_ERROR_STEPS = ((0.5, "#cfe3f5"), (1.0, "#7fb2dd"), (10.0, "#f4a582"), (np.inf, "#b2182b"))


def draw_error_map(found: ErrorMap) -> Markup:
    """Draw the cells of a map of errors in four colours."""
    ratios = np.array([[np.inf if cell is None else cell for cell in row] for row in found.cells])
    steps = np.searchsorted([limit for limit, _ in _ERROR_STEPS[:-1]], ratios)

    def draw(one: Figure) -> None:
        axes = one.add_subplot()
        colors = ListedColormap([color for _, color in _ERROR_STEPS])
        edges = [np.linspace(0, size, count + 1) for size, count in zip(found_size, steps.shape, strict=True)]
        axes.pcolormesh(edges[1], edges[0], steps, cmap=colors, vmin=-0.5, vmax=3.5, linewidth=0)
        axes.invert_yaxis()
        axes.set_xlabel("column", fontsize=10)
        axes.set_ylabel("row", fontsize=10)
        names = ("up to half of what is allowed", "up to what is allowed", "up to 10 times that", "more, or not finite")
        handles = [Patch(color=color, label=name) for (_, color), name in zip(_ERROR_STEPS, names, strict=True)]
        one.legend(handles=handles, ncols=2, fontsize=9, frameon=False, loc="outside upper left")

    found_size = (found.rows, found.columns)
    return render_svg(f"map of the errors of {found.output}", 1.4 + min(2.6, 0.12 * len(steps)), draw)


def _worst(axes: Axes, rows: Sequence[tuple[str, CorrectnessRow]], marks: _Marks) -> None:
    """Draw the worst ratio of error to rounding bound per (shape, seed). The line marked 1 is the limit."""
    shapes = list(dict.fromkeys(row.shape for _, row in rows))
    for n, (role, (color, marker, _)) in enumerate(marks.items()):
        marked = [
            (shapes.index(row.shape) + 0.16 * (n - (len(marks) - 1) / 2), row.bound_ratio)
            for name, row in rows
            if name == role and row.bound_ratio is not None and np.isfinite(row.bound_ratio)
        ]
        axes.plot(
            [x for x, _ in marked],
            [y for _, y in marked],
            color=color,
            marker=marker,
            markersize=4,
            linestyle="",
            label=formatting.short(role),
        )
    axes.axhline(1, color=REQUIRED, linewidth=1.5)
    axes.set_ylim(bottom=0)
    axes.set_xlim(-0.6, len(shapes) - 0.4)
    rotation = 30 if len(shapes) > 4 else 0
    names = [formatting.short(shape) for shape in shapes]
    axes.set_xticks(range(len(shapes)), names, rotation=rotation, ha="right" if rotation else "center")
    axes.set_title("worst element / what rounding explains, by shape and seed", fontsize=11, loc="left")
    axes.legend(fontsize=10, frameon=False)
    clean(axes)


def draw_counts(ratios: Sequence[tuple[str, float]]) -> Markup:
    """Draw bars of the candidate's counts over the baseline's, on a logarithmic scale around 1."""

    def draw(one: Figure) -> None:
        axes = one.add_subplot()
        for y, (_, ratio) in enumerate(ratios):
            color = CANDIDATE[0] if ratio > 1 else BASELINE[0]
            axes.barh(y, np.log2(ratio), color=color, height=0.6)
            axes.annotate(
                f"{ratio:.2f}x", (np.log2(ratio), y), (3 if ratio >= 1 else -3, 0), textcoords="offset points",
                va="center", ha="left" if ratio >= 1 else "right", fontsize=9,
            )  # fmt: skip
        axes.axvline(0, color="0.3", linewidth=1)
        axes.set_yticks(range(len(ratios)), [name for name, _ in ratios])
        axes.set_ylim(len(ratios) - 0.4, -0.6)
        axes.margins(x=0.18)
        low, high = axes.get_xlim()
        step = max(1, round((high - low) / 6))
        ticks = range(int(np.ceil(low)), int(np.floor(high)) + 1, step)
        axes.set_xticks(list(ticks), [f"{2.0**tick:g}x" for tick in ticks])
        axes.set_title("candidate / baseline", fontsize=11, loc="left")
        clean(axes)

    return render_svg("counts of the candidate over the baseline's", 0.8 + 0.27 * len(ratios), draw)

"""Figures as SVG inside of a page: drawn by matplotlib, coloured by the page, so that they follow light and dark."""

from __future__ import annotations

import hashlib
import io
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from markupsafe import Markup
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from greenfast.judge.record_schema import CorrectnessRow, Histogram, Record, SpeedupRow
from greenfast.judge.report import facts, formatting
from greenfast.judge.report.plots import (
    BASELINE,
    CANDIDATE,
    MAX_PANELS,
    NOISE,
    REQUIRED,
    clean,
    draw_blocks,
    draw_forest,
)

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
_COLOR = re.compile(r"((?:fill|stroke): )(#[0-9a-f]{6})")
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",  # text stays text: small, and found by a search
    "font.sans-serif": ["DejaVu Sans"],
    "text.parse_math": False,  # a name may hold a $
    "axes.formatter.use_mathtext": False,
}


def drawing(label: str, height: float, draw: Callable[[Figure], None], *, width: float = WIDTH) -> Markup:
    """Return the SVG of a figure that ``draw`` fills. The size is in inches.

    label: what it shows, for readers without the picture.
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
    rest = _COLOR.sub(lambda found: f"{found[1]}{_page_color(found[2])}", rest)
    wide = Markup(' class="wide"') if width > WIDTH else ""
    opening = Markup('<svg role="img"{} aria-label="{}" {}>').format(wide, label, Markup(box[0] if box else ""))
    return opening + Markup(rest)


def _page_color(color: str) -> str:
    return f"var(--{_COLORS[color]})" if color in _COLORS else color


def speedups(rows: Sequence[SpeedupRow]) -> Markup:
    """Draw a line per speedup with its interval, the noise band and the requirement."""
    return drawing(
        "speedups with their intervals, the noise band around 1 and the required speedup",
        1.0 + 0.5 * len(rows),
        lambda one: draw_forest(one.add_subplot(), rows),
    )


#: Field of TimingRow -> the axis under which it is drawn.
_BLOCK_VALUES = {"block_medians_us": "median, µs", "block_mhz": "SM clock, MHz", "block_watts": "power, W"}


def blocks(record: Record) -> Markup:
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

    return drawing("medians of the interleaved blocks", 0.5 + 1.7 * max(1, len(panels)), draw)


def _has(record: Record, row: SpeedupRow, values: str) -> bool:
    sides = (record.baseline, record.candidate)
    return any(any(getattr(timing, values)) for side in sides for timing in facts.timing_of(side, row))


def errors(rows: Sequence[tuple[str, CorrectnessRow]]) -> Markup:
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
        found = {role: _joined([getattr(row, field) for name, row in rows if name == role]) for role in roles}
        if all(h is not None for h in found.values()):
            panels.append(lambda axes, found=found, title=title: _histograms(axes, found, marks, title))  # type: ignore[misc]
    panels.append(lambda axes: _worst(axes, rows, marks))

    def draw(one: Figure) -> None:
        for i, panel in enumerate(panels):
            panel(one.add_subplot(len(panels), 1, i + 1))

    return drawing("distribution of errors", 0.3 + 2.1 * len(panels), draw)


_Marks = dict[str, tuple[str, str, str]]


def _joined(found: Sequence[Histogram | None]) -> Histogram | None:
    """Merge histograms; None if one is missing or has other bins."""
    first = next(iter(found), None)
    if first is None or len(first.counts) < 3 or first.per_decade < 1:
        return None
    total = np.zeros(len(first.counts), np.int64)
    for one in found:
        if one is None or (one.first, one.per_decade, len(one.counts)) != (
            first.first, first.per_decade, len(first.counts)
        ):  # fmt: skip
            return None
        total += np.asarray(one.counts, np.int64)
    return Histogram(first=first.first, per_decade=first.per_decade, counts=total.tolist())


def _histograms(axes: Axes, found: dict[str, Histogram], marks: _Marks, title: str) -> None:
    """Draw steps over log10 of the value. The outer bins contain the values beyond the edges."""
    widest: list[float] = []
    for role, histogram in found.items():
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


def _worst(axes: Axes, rows: Sequence[tuple[str, CorrectnessRow]], marks: _Marks) -> None:
    """Draw the worst ratio of error to rounding bound per (shape, seed). The line at 1 is the limit."""
    shapes = list(dict.fromkeys(row.shape for _, row in rows))
    for n, (role, (color, marker, _)) in enumerate(marks.items()):
        at = [
            (shapes.index(row.shape) + 0.16 * (n - (len(marks) - 1) / 2), row.bound_ratio)
            for name, row in rows
            if name == role and row.bound_ratio is not None and np.isfinite(row.bound_ratio)
        ]
        axes.plot(
            [x for x, _ in at],
            [y for _, y in at],
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


def counts(ratios: Sequence[tuple[str, float]]) -> Markup:
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

    return drawing("counts of the candidate over the baseline's", 0.8 + 0.27 * len(ratios), draw)

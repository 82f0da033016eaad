"""The runs of kernels over time, as a page."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from greenfast.judge.report.formatting import Section
from greenfast.judge.report.history import HEADER, NUMBERS, History, Point
from greenfast.judge.report.plots import BASELINE, CANDIDATE, NOISE, REQUIRED, clean
from greenfast.judge.report.webpage.charts import drawing
from greenfast.judge.report.webpage.page import bullets, figure, page, paragraph, table

_MAX_LABELS = 12


def history_page(title: str, histories: Sequence[History], skipped: Sequence[str] = ()) -> str:
    """A section per kernel. skipped: why files were left out."""
    sections = [Section(one.title, _parts(one)) for one in histories]
    if skipped:
        sections.append(Section("Left out", [bullets(skipped)]))
    runs = sum(len(one.points) for one in histories)
    return page(title, sections, claims=[f"{runs} runs of {len(histories)} kernels."])


def _parts(history: History) -> list[Markup]:
    timed = [p for p in history.points if p.candidate_us or p.speedup]
    parts = [table(HEADER, history.rows(), right=NUMBERS)]
    if not timed:
        return [paragraph("None of these runs was timed."), *parts]
    if len(timed) < 2:
        return parts
    caption = (
        f"{history.shape}, {history.cache} L2, in the order of time. A dotted line: the candidate's machine code is "
        "another than in the run before."
    )
    if any(p.speedup for p in timed):
        caption += " Grey: the noise floor; green: what was required."
    return [figure(_drawing(timed), caption), *parts]


def _drawing(points: Sequence[Point]) -> Markup:
    panels = [_times] if not any(p.speedup for p in points) else [_speedups, _times]

    def draw(one: Figure) -> None:
        for i, panel in enumerate(panels):
            axes = one.add_subplot(len(panels), 1, i + 1)
            panel(axes, points)
            _over_time(axes, points, last=i == len(panels) - 1)

    return drawing("speedups and times over the runs", 0.6 + 2.2 * len(panels), draw)


def _speedups(axes: Axes, points: Sequence[Point]) -> None:
    axes.axhline(1, color="0.3", linewidth=1)
    for x, p in enumerate(points):
        if p.speedup is None:
            continue
        row = p.speedup
        top = 1 + row.noise_floor
        axes.fill_between([x - 0.4, x + 0.4], 1 / top, top, color=NOISE, linewidth=0)
        if row.required:
            axes.plot([x - 0.4, x + 0.4], [row.required] * 2, color=REQUIRED, linewidth=2)
        error = [[row.speedup - row.ci_low], [row.ci_high - row.speedup]]
        axes.errorbar([x], [row.speedup], yerr=error, color="black", marker="s", markersize=4, capsize=3)
    axes.set_ylabel("speedup", fontsize=10)


def _times(axes: Axes, points: Sequence[Point]) -> None:
    for (color, marker, role), name in ((BASELINE, "baseline_us"), (CANDIDATE, "candidate_us")):
        at = [(x, getattr(p, name)) for x, p in enumerate(points) if getattr(p, name) is not None]
        if at:
            axes.plot([x for x, _ in at], [us for _, us in at], color=color, marker=marker, markersize=5, label=role)
    axes.set_ylim(0, 1.3 * max((us for p in points for us in (p.baseline_us, p.candidate_us) if us), default=1))
    axes.set_ylabel("p50, µs", fontsize=10)
    axes.legend(fontsize=10, frameon=False)


def _over_time(axes: Axes, points: Sequence[Point], *, last: bool) -> None:
    for x, (before, now) in enumerate(pairwise(points)):
        if before.code != now.code:
            axes.axvline(x + 0.5, color="0.6", linewidth=1, linestyle=":")
    step = -(-len(points) // _MAX_LABELS)
    shown = range(0, len(points), step)
    labels = [f"{points[x].created[:10]}\n{points[x].commit[:7]}" if last else "" for x in shown]
    axes.set_xticks(list(shown), labels, rotation=35, ha="right")
    axes.set_xlim(-0.6, len(points) - 0.4)
    clean(axes)

"""A record as one figure: block medians over time, and speedups with their intervals."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from textwrap import shorten

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle

from greenfast.judge.record_schema import Record, Side, SpeedupRow, TimingRow
from greenfast.judge.report import facts, formatting

# Okabe and Ito's colours, told apart with every common colour blindness; markers differ too.
BASELINE = ("#0072B2", "o", "baseline")
CANDIDATE = ("#D55E00", "^", "candidate")
REQUIRED = "#009E73"
NOISE = "#BBBBBB"
MAX_PANELS = 4


def save_plot(record: Record, path: Path) -> None:
    """Write the figure as PNG or SVG, by the path's suffix; a record without speedups gives a figure that says why.

    Left, a panel per deciding shape (at most 4): each block's median in microseconds, in the order of processes and
    blocks, a mark's column being one interleaved block. Right: the speedups with their intervals, what is required,
    and the band of the noise floor. Raises ValueError for another suffix, OSError where the file cannot be written.
    """
    if path.suffix not in (".png", ".svg"):
        raise ValueError(f"a plot is .png or .svg, got {path.name!r}")
    panels = facts.deciding_speedups(record.speedups)[:MAX_PANELS]
    height = max(4.6, 1.2 + 2.1 * len(panels), 1.9 + 0.62 * len(record.speedups)) if panels else 2.5
    figure = Figure(figsize=(13, height), layout="constrained")
    FigureCanvasAgg(figure)
    sides = f"{record.baseline.variant} -> {record.candidate.variant}"
    where = f"{record.task}, {record.format}, {facts.device(record)}, commit {facts.commit(record)}"
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
    figure.savefig(path, dpi=120)


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
    """Both sides' block medians of one shape, a faint rule between processes, a name at each seed.

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
    """(seed, process, a value per block) in the order of the run."""
    for timing in facts.timing_of(side, row):
        for process, block in enumerate(getattr(timing, values)):
            yield timing.seed, process, block


def _method(side: Side, row: SpeedupRow) -> str:
    rows: list[TimingRow] = facts.timing_of(side, row)
    return f", timed by {rows[0].method}" if rows else ""


def draw_forest(axes: Axes, rows: Sequence[SpeedupRow]) -> None:
    """A line per speedup: its interval, its noise band around 1, its requirement, its verdict in words."""
    axes.axvline(1, color="0.3", linewidth=1)
    for y, row in enumerate(rows):
        band = 1 / (1 + row.noise_floor)
        axes.add_patch(Rectangle((band, y - 0.4), 1 + row.noise_floor - band, 0.8, color=NOISE, linewidth=0))
        error = [[row.speedup - row.ci_low], [row.ci_high - row.speedup]]
        axes.errorbar([row.speedup], [y], xerr=error, color="black", marker="s", markersize=5, capsize=4, linewidth=1.8)
        if row.required:
            axes.plot([row.required] * 2, [y - 0.4, y + 0.4], color=REQUIRED, linewidth=2)
        said = f"{formatting.speedup(row.speedup)} {formatting.interval(row.ci_low, row.ci_high)}\n{row.verdict}"
        if row.required:
            said += f", required {formatting.requirement(row.required)}"
        # Outside the axes, where it cannot cover a mark; the layout makes room.
        axes.text(1.02, y, said, transform=axes.get_yaxis_transform(), va="center", fontsize=10)
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
    """Axes without a box, on a faint grid."""
    axes.tick_params(labelsize=10)
    axes.grid(axis="both", color="0.93")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)

"""The runs of a kernel in the order of time, as rows of a table and as a page."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from greenfast.judge.record_schema import BenchRecord, Build, Record, SpeedupRow
from greenfast.judge.report import facts, formatting
from greenfast.judge.report.formatting import Section
from greenfast.judge.report.plots import BASELINE, CANDIDATE, NOISE, REQUIRED, clean, render_svg
from greenfast.judge.report.webpage.page import bullets, figure, page, paragraph, table

#: The columns of ``History.rows``.
HEADER = (
    "date",
    "commit",
    "decision",
    "p50 µs",
    "speedup",
    "interval",
    "required",
    "verdict",
    "machine code",
    "record",
)
NUMBERS = ("p50 µs", "speedup", "interval")


@dataclass(frozen=True)
class Point:
    """One run. p50s in microseconds, medians over seeds; None if the run did not measure one."""

    created: str
    commit: str
    decision: str
    baseline_us: float | None
    candidate_us: float | None
    speedup: SpeedupRow | None
    code: str
    path: str


@dataclass(frozen=True)
class History:
    """The runs of one kernel on one device, oldest first, on one shape and cache state."""

    title: str
    shape: str
    cache: str
    points: tuple[Point, ...]

    def rows(self) -> list[tuple[str, ...]]:
        """Return a row per run."""
        return [
            (
                p.created[:16].replace("T", " "),
                p.commit,
                p.decision,
                " → ".join(formatting.micros(us) for us in (p.baseline_us, p.candidate_us) if us is not None)
                or formatting.NONE,
                *_speedup_cells(p.speedup),
                p.code,
                p.path,
            )
            for p in self.points
        ]


def _speedup_cells(row: SpeedupRow | None) -> tuple[str, ...]:
    if row is None:
        return (formatting.NONE,) * 4
    return (
        formatting.speedup(row.speedup),
        formatting.interval(row.ci_low, row.ci_high),
        formatting.requirement(row.required),
        row.verdict,
    )


def histories(records: Sequence[tuple[str, Record | BenchRecord]], shape: str | None = None) -> list[History]:
    """Group the runs by kernel: equal task, format, target, device and variants.

    records: path and record. shape: the one shown; by default the one that decided most often, else the first timed.
    Runs without times are listed too; speedups that a run quotes from another one are not its own.
    """
    groups: dict[str, list[tuple[str, Record | BenchRecord]]] = {}
    for path, record in records:
        variants = " → ".join(side.variant for _, side in record.sides())
        title = f"{record.task}: {variants}, {record.format}, {record.arch} on {facts.device(record)}"
        groups.setdefault(title, []).append((path, record))
    return [_history(title, members, shape) for title, members in sorted(groups.items())]


def _history(title: str, members: Sequence[tuple[str, Record | BenchRecord]], shape: str | None) -> History:
    timed = [(row.shape, row.cache) for _, record in members for _, side in record.sides() for row in side.timing]
    gated = [(r.shape, r.cache) for _, one in members if isinstance(one, Record) for r in one.speedups if r.gated]
    wanted = [cell for cell in (*gated, *timed) if shape in (None, cell[0])]
    decided = Counter(cell for cell in gated if cell in wanted)
    name, cache = (
        max(decided, key=lambda cell: (decided[cell], cell)) if decided else (wanted or [(shape or "", "warm")])[0]
    )
    points = sorted((_point(path, record, name, cache) for path, record in members), key=lambda point: point.created)
    return History(title, name, cache, tuple(points))


def _point(path: str, record: Record | BenchRecord, shape: str, cache: str) -> Point:
    sides = [side for _, side in record.sides()]
    times = [facts.p50_us(t for t in side.timing if (t.shape, t.cache) == (shape, cache)) for side in sides]
    speedups = record.speedups if isinstance(record, Record) else []
    builds = [build for build in sides[-1].builds if shape in build.shapes] or sides[-1].builds
    return Point(
        created=record.created,
        commit=record.git.short,
        decision=record.decision if isinstance(record, Record) else formatting.NONE,
        baseline_us=times[0] if len(times) > 1 else None,
        candidate_us=times[-1],
        speedup=next((row for row in speedups if (row.shape, row.cache) == (shape, cache)), None),
        code=_hash_code(builds),
        path=path,
    )


def _hash_code(builds: Sequence[Build]) -> str:
    """Return the hash of the machine code; of several kernels one over all of their hashes."""
    codes = list(dict.fromkeys(build.code_hash for build in builds if build.code_hash))
    if len(codes) > 1:
        return hashlib.sha256(" ".join(codes).encode()).hexdigest()[: len(codes[0])]
    return codes[0] if codes else formatting.NONE


_MAX_LABELS = 12


def history_page(title: str, histories: Sequence[History], skipped: Sequence[str] = ()) -> str:
    """Return the page with a section per kernel. skipped: the reasons for skipped files."""
    sections = [Section(one.title, _parts(one)) for one in histories]
    if skipped:
        sections.append(Section("Left out", [bullets(skipped)]))
    runs = sum(len(one.points) for one in histories)
    return page(title, sections, claims=[f"{runs} runs of {len(histories)} kernels."])


def _parts(history: History) -> list[Markup]:
    timed = [p for p in history.points if p.candidate_us or p.speedup]
    parts = [table(HEADER, history.rows(), right=NUMBERS)]
    if not timed:
        return [paragraph("No run was timed."), *parts]
    if len(timed) < 2:
        return parts
    caption = (
        f"{history.shape}, {history.cache} L2, in the order of time. A dotted line: the candidate's machine code is "
        "another than in the run before."
    )
    if any(p.speedup for p in timed):
        caption += " Grey: the noise floor; green: the requirement."
    return [figure(_drawing(timed), caption), *parts]


def _drawing(points: Sequence[Point]) -> Markup:
    panels = [_times] if not any(p.speedup for p in points) else [_speedups, _times]

    def draw(one: Figure) -> None:
        for i, panel in enumerate(panels):
            axes = one.add_subplot(len(panels), 1, i + 1)
            panel(axes, points)
            _over_time(axes, points, last=i == len(panels) - 1)

    return render_svg("speedups and times over the runs", 0.6 + 2.2 * len(panels), draw)


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
        times = [(x, getattr(p, name)) for x, p in enumerate(points) if getattr(p, name) is not None]
        if times:
            axes.plot(
                [x for x, _ in times], [us for _, us in times], color=color, marker=marker, markersize=5, label=role
            )
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

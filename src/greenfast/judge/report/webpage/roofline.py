"""The roofline: measured times against the device's limits for the problem's minimum work."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup
from matplotlib.figure import Figure

from greenfast.judge.record_schema import Run, Side
from greenfast.judge.report import facts, formatting
from greenfast.judge.report.plots import BASELINE, CANDIDATE, REQUIRED, clean, render_svg
from greenfast.judge.report.webpage.page import figure, paragraph, table
from greenfast.spec.limits import Peaks, get_peaks, least_times_us


@dataclass(frozen=True)
class Work:
    """The minimum work of a shape: counts by their names in KernelCounts, and bytes of inputs and outputs.

    moved_bytes: 0 if unknown.
    """

    least: Mapping[str, int]
    moved_bytes: int = 0

    @property
    def intensity(self) -> float:
        """Operations of matrix products per byte; 0 if one of them is unknown."""
        return self.least.get("matrix_flops", 0) / self.moved_bytes if self.moved_bytes else 0.0


@dataclass(frozen=True)
class _Point:
    role: str
    shape: str
    cache: str
    us: float
    work: Work
    least_us: dict[str, float]

    @property
    def flops(self) -> float:
        """The problem's operations of matrix products per second."""
        return self.work.least.get("matrix_flops", 0) / self.us * 1e6

    def share(self, kind: str) -> str:
        """Format the minimum time of this kind of work over the measured time."""
        return formatting.percent(self.least_us[kind] / self.us) if kind in self.least_us else formatting.NONE


def section(record: Run, work: Mapping[str, Work]) -> list[Markup]:
    """Return the roofline with its table, or the reason why there is none. work: by shape."""
    if not any(side.timing for _, side in record.sides()):
        return [paragraph("Nothing was timed in this run.")]
    peaks = get_peaks(record.device, record.format)
    if peaks is None:
        return [paragraph(f"The peaks of {facts.device(record)} are not known to this version of greenfast.")]
    points = [point for role, side in record.sides() for point in _points(role, side, work, peaks)]
    if not points:
        return [paragraph("The problem states no minimum work, so there is no ceiling to compare with.")]
    parts = []
    drawn = [point for point in points if point.cache == "warm" and point.work.intensity and point.us > 0]
    if drawn and peaks.memory_bytes:
        parts.append(figure(_drawing(drawn, peaks), _caption(record)))
    return [*parts, _table(points), paragraph(_note(peaks))]


def _points(role: str, side: Side, work: Mapping[str, Work], peaks: Peaks) -> Iterator[_Point]:
    for shape, cache in dict.fromkeys((row.shape, row.cache) for row in side.timing):
        us = facts.p50_us(row for row in side.timing if (row.shape, row.cache) == (shape, cache))
        one = work.get(shape)
        if one is None or us is None or us <= 0:
            continue
        least_us = least_times_us(one.least, one.moved_bytes, peaks)
        if least_us:
            yield _Point(role, shape, cache, us, one, least_us)


def _drawing(points: Sequence[_Point], peaks: Peaks) -> Markup:
    roles = list(dict.fromkeys(point.role for point in points))
    marks_of = _letters(points)
    marks = dict(zip(roles, (BASELINE, CANDIDATE) if len(roles) > 1 else (CANDIDATE,), strict=False))
    ridge = peaks.matrix_flops / peaks.memory_bytes
    low = min(ridge, *(point.work.intensity for point in points)) / 2
    high = max(ridge, *(point.work.intensity for point in points)) * 2.5

    def draw(one: Figure) -> None:
        axes = one.add_subplot()
        axes.set_xscale("log")
        axes.set_yscale("log")
        roof = [(x, min(peaks.matrix_flops, x * peaks.memory_bytes) / 1e12) for x in (low, ridge, high)]
        axes.plot([x for x, _ in roof], [y for _, y in roof], color="0.3", linewidth=2)
        axes.annotate(
            f"{peaks.matrix_flops / 1e12:.0f} TFLOP/s of matrix instructions", (high, roof[2][1]), (0, 4),
            textcoords="offset points", ha="right", fontsize=9,
        )  # fmt: skip
        axes.annotate(
            f"{peaks.memory_bytes / 1e12:g} TB/s of memory", roof[0], (12, -4), textcoords="offset points", fontsize=9
        )
        for point in {p.shape: p for p in points}.values():
            if "exponentials" in point.least_us:
                rate = point.work.least["matrix_flops"] / point.least_us["exponentials"] / 1e6
                x = point.work.intensity
                axes.plot([x / 1.12, x * 1.12], [rate, rate], color=REQUIRED, linewidth=2)
        for role, (color, marker, _) in marks.items():
            own = [p for p in points if p.role == role]
            places = [p.work.intensity for p in own], [p.flops / 1e12 for p in own]
            axes.plot(*places, color=color, marker=marker, markersize=5, linestyle="", label=formatting.short(role))
        fastest = {p.shape: p for p in sorted(points, key=lambda p: p.flops)}
        for n, p in enumerate(sorted(fastest.values(), key=lambda p: (p.flops, p.work.intensity))):
            axes.annotate(
                marks_of[p.shape], (p.work.intensity, p.flops / 1e12), (7 if n % 2 else -7, 0),
                textcoords="offset points", ha="left" if n % 2 else "right", va="center", fontsize=10, color="0.35",
            )  # fmt: skip
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(lambda value, _: f"{value:g}")
            axis.set_minor_formatter(lambda value, _: "")
        axes.set_xlim(low, high)
        axes.set_xlabel("needed operations per byte of inputs and outputs", fontsize=10)
        axes.set_ylabel("needed TFLOP/s", fontsize=10)
        axes.legend(fontsize=10, frameon=False, loc="lower right")
        clean(axes)

    return render_svg(
        "roofline: rate of needed operations over operations per byte, with the device's ceilings", 4.0, draw
    )


def _caption(record: Run) -> str:
    return (
        "Roofline with warm L2: the rate at which the operations that the problem needs were done, and the limits of "
        f"{facts.device(record)} at its highest clock. The short lines are the limits of a kernel that "
        "computes every exponential on the special function units; polynomials go beyond. Letters: shapes, "
        "as in the table."
    )


def _table(points: Sequence[_Point]) -> Markup:
    letters = _letters(points)
    header = ("", "shape", "L2", "side", "p50 µs", "TFLOP/s", "of matrix peak", "of special functions", "of bandwidth")
    rows = [
        (
            letters[p.shape],
            p.shape,
            p.cache,
            p.role,
            formatting.micros(p.us),
            f"{p.flops / 1e12:.3g}" if p.flops else formatting.NONE,
            p.share("matrix"),
            p.share("exponentials"),
            p.share("memory"),
        )
        for p in sorted(points, key=lambda p: (letters[p.shape], p.cache != "warm"))
    ]
    return table(header, rows, right=header[4:])


def _letters(points: Sequence[_Point]) -> dict[str, str]:
    """Return a short label for each shape, for its row in the table: a to z, then aa, ab and so on."""
    shapes = list(dict.fromkeys(p.shape for p in points))
    return {shape: chr(97 + n // 26 - 1) * (n >= 26) + chr(97 + n % 26) for n, shape in enumerate(shapes)}


def _note(peaks: Peaks) -> str:
    bandwidth = f", {peaks.memory_bytes / 1e12:g} TB/s of device memory" if peaks.memory_bytes else ""
    return (
        f"Ceilings: {peaks.matrix_flops / 1e12:.0f} TFLOP/s, {peaks.exponentials / 1e12:.2f} T exponentials/s"
        f"{bandwidth}. A share is the least time that the work can take over the measured time; with warm L2 the share "
        "of memory bandwidth may exceed 100 %, as the data need not come from device memory."
    )

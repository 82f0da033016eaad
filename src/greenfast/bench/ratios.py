"""Ratios of the times of contenders, by shape and as one number."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from greenfast.bench.record_schema import Row, SpeedupPair
from greenfast.judge.report import formatting


def ratios(rows: Sequence[Row], versus: SpeedupPair) -> dict[str, float]:
    """By shape, the time of the fastest rival divided by the time of own: above 1 own is faster.

    Without the shapes where own or every rival has no time, and those of other groups.
    """
    found = {}
    for shape, cells in by_shape(of_group(rows, versus.group)).items():
        times = {name: row.median_us for name, row in cells.items() if row.median_us is not None}
        rivals = [us for name, us in times.items() if name in versus.rivals]
        if versus.own in times and rivals:
            found[shape] = min(rivals) / times[versus.own]
    return found


def geometric_mean(values: Sequence[float]) -> float:
    """exp of the mean logarithm."""
    return math.exp(math.fsum(map(math.log, values)) / len(values))


def headline(rows: Sequence[Row], versus: Iterable[SpeedupPair]) -> str:
    """For each ratio the geometric mean over the grid, or over what was measured of it, and the worst shape."""
    return "; ".join(_headline(rows, one) for one in versus)


def _headline(rows: Sequence[Row], versus: SpeedupPair) -> str:
    rows = of_group(rows, versus.group)
    found = ratios(rows, versus)
    if not found:
        return f"speed of {versus.title}: not timed"
    grid = {shape: found[shape] for shape in dict.fromkeys(r.shape for r in rows if r.grid) if shape in found}
    where, what = (grid, "of the grid") if grid else (found, "outside of the grid")
    worst = min(where, key=lambda shape: where[shape])
    every = len({row.shape for row in rows if row.grid == bool(grid)})
    of = "" if len(where) == every else f" of {every}"
    return (
        f"speed of {versus.title}: {formatting.speedup(geometric_mean(list(where.values())))}, geometric mean over "
        f"{len(where)}{of} shapes {what}; worst {worst} {formatting.speedup(where[worst])}"
    )


def by_shape(rows: Sequence[Row]) -> dict[str, dict[str, Row]]:
    """By shape, the rows of its contenders by name."""
    found: dict[str, dict[str, Row]] = {}
    for row in rows:
        found.setdefault(row.shape, {})[row.contender] = row
    return found


def of_group(rows: Sequence[Row], group: str) -> list[Row]:
    """The rows whose shapes' names begin so."""
    return [row for row in rows if row.shape.startswith(group)]

"""Compute the time ratios of backends, by shape and as one number."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from benchmarks.record_schema import Row, SpeedupPair
from greenfast.judge.report import formatting


def ratios(rows: Sequence[Row], versus: SpeedupPair) -> dict[str, float]:
    """Return by shape the fastest baseline's time divided by the time of ``own``; above 1 ``own`` is faster.

    Shapes of other groups, and shapes without a time of ``own`` or of any baseline, are left out.
    """
    found = {}
    for shape, cells in by_shape(select_group(rows, versus.group)).items():
        times = {name: row.median_us for name, row in cells.items() if row.median_us is not None}
        baselines = [us for name, us in times.items() if name in versus.baselines]
        if versus.own in times and baselines:
            found[shape] = min(baselines) / times[versus.own]
    return found


def geometric_mean(values: Sequence[float]) -> float:
    """Return the geometric mean."""
    return math.exp(math.fsum(map(math.log, values)) / len(values))


def headline(rows: Sequence[Row], versus: Iterable[SpeedupPair]) -> str:
    """Describe each ratio: its geometric mean over the measured shapes of the grid, and the worst shape."""
    return "; ".join(_headline(rows, one) for one in versus)


def _headline(rows: Sequence[Row], versus: SpeedupPair) -> str:
    rows = select_group(rows, versus.group)
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
    """Group rows by shape, then by backend."""
    found: dict[str, dict[str, Row]] = {}
    for row in rows:
        found.setdefault(row.shape, {})[row.backend] = row
    return found


def select_group(rows: Sequence[Row], group: str) -> list[Row]:
    """Return the rows with a shape name that starts with ``group``."""
    return [row for row in rows if row.shape.startswith(group)]

"""A shape's speedup from the rows that a record stores, when it is measured and whenever the record is read again."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from greenfast.judge.record_schema import SpeedupRow, TimingRow
from greenfast.judge.timing.estimators import (
    Interval,
    noise_floor,
    pool_seeds,
    resolved_floor,
    speedup_interval,
    verdict,
)

AGAIN = "baseline again"  # the A of the A/A comparison
#: With fewer fresh processes an interval says nothing about the next process; no claim is made then.
MIN_PROCESSES = 3
#: The captured launches of a baseline may take this many times the function's own time, and so many microseconds more.
_REPLAY_RATIO, _REPLAY_US = 1.05, 2.0


def speedup_row(
    baseline: Sequence[TimingRow],
    candidate: Sequence[TimingRow],
    again: Sequence[TimingRow],
    shape: str,
    cache: str,
    *,
    confidence: float,
    required: float | None,
    gated: bool,
) -> SpeedupRow:
    """The speedup, interval, noise floor and verdict of one shape, its seeds pooled, from each side's timing rows.

    again: the baseline timed again. All figures come from the row's rounded ones, so that reading it again gives the
    same.

    Raises ValueError where fewer than ``MIN_PROCESSES`` processes have timings, and for blocks that are not paired.
    """
    one, other = _blocks(baseline, shape, cache), _blocks(candidate, shape, cache)
    if len(one) < MIN_PROCESSES:  # few iterations reach few processes; a low clock takes others
        asked = max((len(row.block_medians_us) for row in _rows(baseline, shape, cache)), default=0)
        kept = f"{shape}, {cache} L2: only {len(one)} of {asked} processes have timings"
        raise ValueError(f"{kept}; a claim needs at least {MIN_PROCESSES}")
    exact = speedup_interval(one, other, confidence=confidence)
    interval = Interval(round(exact.estimate, 4), round(exact.low, 4), round(exact.high, 4))
    floor = noise_floor(one, _blocks(again, shape, cache))
    sides = [row for side in (baseline, candidate, again) for row in _rows(side, shape, cache)]
    shortest = min(np.median(np.concatenate(side)) for side in (one, other))
    floor = round(resolved_floor(floor, max(row.resolution_us for row in sides), float(shortest)), 5)
    return SpeedupRow(
        shape=shape,
        cache=cache,
        speedup=interval.estimate,
        ci_low=interval.low,
        ci_high=interval.high,
        confidence=confidence,
        noise_floor=floor,
        required=required or 0.0,
        gated=gated,
        verdict=verdict(interval, noise_floor=floor, required=required or 0.0),
        processes=len(one),
        blocks=sum(len(process) for process in one),
        slow_replay=_slow_replay(_rows(baseline, shape, cache), float(np.median(np.concatenate(one)))) if gated else "",
    )


def _slow_replay(rows: Sequence[TimingRow], replay_us: float) -> str:
    """Return why a captured baseline is too slow to compare with, empty if it is not or was not captured."""
    function_us = max(row.function_us for row in rows)
    if not function_us or replay_us <= _REPLAY_RATIO * function_us + _REPLAY_US:
        return ""
    return f"the replayed baseline is slower than the function: {replay_us:.4g} µs, {function_us:.4g} µs"


def _rows(rows: Sequence[TimingRow], shape: str, cache: str) -> list[TimingRow]:
    return [row for row in rows if (row.shape, row.cache) == (shape, cache)]


def _blocks(rows: Sequence[TimingRow], shape: str, cache: str) -> list[list[float]]:
    """[process][block] over all seeds; a process may have lost all its blocks to a low clock."""
    found = _rows(rows, shape, cache)
    return [process for process in pool_seeds([row.block_medians_us for row in found]) if process] if found else []

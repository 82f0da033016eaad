"""Two sets of timings compared: the content of ``results/COMPARE.md``."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from greenfast.judge.record_schema import TimingRow
from greenfast.judge.report import formatting
from greenfast.spec.errors import UsageError

_Key = tuple[str, int]
_Label = tuple[str, str]


@dataclass(frozen=True)
class TimedPair:
    """The p50s of both sides for a shape and a seed, in microseconds. speedup: the baseline's over the candidate's."""

    shape: str
    dims: Mapping[str, int]
    seed: int
    baseline_us: float
    candidate_us: float
    speedup: float


@dataclass(frozen=True)
class TimingComparison:
    """Both sides under one timing method and cache state. only_in_*: (shape, seed) pairs of one side."""

    method: str
    cache: str
    pairs: tuple[TimedPair, ...]
    average_speedup: float
    required: float | None
    only_in_baseline: tuple[_Key, ...]
    only_in_candidate: tuple[_Key, ...]


def compare_timings(
    baseline: Sequence[TimingRow], candidate: Sequence[TimingRow], *, required: float | None
) -> list[TimingComparison]:
    """Return a comparison per timing method and cache state, with the geometric mean of the speedups.

    required: the least average speedup as a ratio (1.15 for +15 %); None without a requirement.

    Raises UsageError if the two sides were not timed by the same methods and cache states (never mix two in one
    comparison), a pair appears twice, a shape has different dimensions, a p50 is not a positive number, nothing is in
    common, or ``required`` is below 1.
    """
    if required is not None and not 1 <= required < math.inf:
        raise UsageError(f"required speedup must be a ratio >= 1 such as 1.15, got {required}")
    base, cand = _by_label("baseline", baseline), _by_label("candidate", candidate)
    if set(base) != set(cand):
        raise UsageError(
            f"baseline was timed by {_labels(base)}, candidate by {_labels(cand)}: never mix two in one comparison"
        )
    return [_compare(label, base[label], cand[label], required) for label in sorted(base)]


def compare_markdown(comparisons: Sequence[TimingComparison]) -> str:
    """Return a table per comparison, with both p50s, their ratio, and the geometric mean with its gate."""
    return "\n\n".join(["# Baseline against candidate", *map(_section, comparisons)]) + "\n"


def _by_label(side: str, rows: Sequence[TimingRow]) -> dict[_Label, dict[_Key, TimingRow]]:
    if not rows:
        raise UsageError(f"{side} holds no timings")
    groups: dict[_Label, dict[_Key, TimingRow]] = {}
    for row in rows:
        if not 0 < row.p50_us < math.inf:
            raise UsageError(f"{side}, {row.shape}, seed {row.seed}: p50 must be a positive time, got {row.p50_us}")
        group = groups.setdefault((row.method, row.cache), {})
        if (row.shape, row.seed) in group:
            raise UsageError(f"{side} holds {row.shape}, seed {row.seed} more than once")
        group[row.shape, row.seed] = row
    return groups


def _labels(groups: dict[_Label, dict[_Key, TimingRow]]) -> str:
    return " and ".join(f"{method} ({cache})" for method, cache in sorted(groups))


def _compare(
    label: _Label, base: dict[_Key, TimingRow], cand: dict[_Key, TimingRow], required: float | None
) -> TimingComparison:
    common = [key for key in base if key in cand]
    if not common:
        raise UsageError(f"baseline and candidate have no (shape, seed) in common under {label[0]} ({label[1]})")
    for key in common:
        if base[key].dims != cand[key].dims:
            a, b = formatting.dims(base[key].dims), formatting.dims(cand[key].dims)
            raise UsageError(f"shape {key[0]} is {a} in the baseline and {b} in the candidate")
    times = [(key, base[key].p50_us, cand[key].p50_us) for key in common]
    pairs = tuple(TimedPair(key[0], base[key].dims, key[1], a, b, a / b) for key, a, b in times)
    average = math.exp(math.fsum(math.log(pair.speedup) for pair in pairs) / len(pairs))
    only_in_baseline = tuple(key for key in base if key not in cand)
    only_in_candidate = tuple(key for key in cand if key not in base)
    return TimingComparison(*label, pairs, average, required, only_in_baseline, only_in_candidate)


def _section(one: TimingComparison) -> str:
    rows = [
        (
            pair.shape,
            formatting.dims(pair.dims),
            str(pair.seed),
            formatting.micros(pair.baseline_us),
            formatting.micros(pair.candidate_us),
            formatting.speedup(pair.speedup),
        )
        for pair in one.pairs
    ]
    numbers = ("baseline p50 µs", "candidate p50 µs", "speedup")
    gate = _gate(one.average_speedup, one.required)
    parts = [
        f"## {one.method} ({one.cache})",
        formatting.table(("shape", "dims", "seed", *numbers), rows, right=numbers),
        f"**Average speedup** (geometric mean of {len(rows)}): {gate}",
        "A ratio of p50s has no confidence interval: a verdict needs both sides timed interleaved in one run.",
    ]
    parts += [
        f"Only in the {side}: " + ", ".join(f"{shape} seed {seed}" for shape, seed in lone)
        for side, lone in (("baseline", one.only_in_baseline), ("candidate", one.only_in_candidate))
        if lone
    ]
    return "\n\n".join(parts)


def _gate(average: float, required: float | None) -> str:
    if required is None:
        return f"{formatting.speedup(average)}, nothing required"
    status = "PASS" if average >= required else "FAIL"
    return f"{formatting.speedup(average)}, required {formatting.requirement(required)}: {status}"

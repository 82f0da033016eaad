"""Two sets of timings compared: the content of ``results/COMPARE.md``."""

from __future__ import annotations

import math
from collections.abc import Sequence

from greenfast.judge.record_schema import TimingRow
from greenfast.judge.report import formatting
from greenfast.spec.errors import UsageError

_Key = tuple[str, int]
_Label = tuple[str, str]


def compare_markdown(baseline: Sequence[TimingRow], candidate: Sequence[TimingRow], *, required: float | None) -> str:
    """A row per (shape, seed) with both p50s and their ratio, and the geometric mean with its gate.

    required: the least average speedup as a ratio (1.15 for +15 %); None where nothing is required. Timings of several
    methods or cache states come as one table each; (shape, seed) pairs of one side only are named.

    Raises UsageError where the two sides were not timed by the same methods and cache states (never mix two in one
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
    sections = [_section(label, base[label], cand[label], required) for label in sorted(base)]
    return "\n\n".join(["# Baseline against candidate", *sections]) + "\n"


def _by_label(side: str, rows: Sequence[TimingRow]) -> dict[_Label, dict[_Key, TimingRow]]:
    if not rows:
        raise UsageError(f"{side} holds no timings")
    found: dict[_Label, dict[_Key, TimingRow]] = {}
    for row in rows:
        if not 0 < row.p50_us < math.inf:
            raise UsageError(f"{side}, {row.shape}, seed {row.seed}: p50 must be a positive time, got {row.p50_us}")
        group = found.setdefault((row.method, row.cache), {})
        if (row.shape, row.seed) in group:
            raise UsageError(f"{side} holds {row.shape}, seed {row.seed} more than once")
        group[row.shape, row.seed] = row
    return found


def _labels(groups: dict[_Label, dict[_Key, TimingRow]]) -> str:
    return " and ".join(f"{method} ({cache})" for method, cache in sorted(groups))


def _section(label: _Label, base: dict[_Key, TimingRow], cand: dict[_Key, TimingRow], required: float | None) -> str:
    common = [key for key in base if key in cand]
    if not common:
        raise UsageError(f"baseline and candidate have no (shape, seed) in common under {label[0]} ({label[1]})")
    for key in common:
        if base[key].dims != cand[key].dims:
            a, b = formatting.dims(base[key].dims), formatting.dims(cand[key].dims)
            raise UsageError(f"shape {key[0]} is {a} in the baseline and {b} in the candidate")
    ratios = [base[key].p50_us / cand[key].p50_us for key in common]
    rows = [
        (
            shape,
            formatting.dims(base[shape, seed].dims),
            str(seed),
            formatting.micros(base[shape, seed].p50_us),
            formatting.micros(cand[shape, seed].p50_us),
            formatting.speedup(ratio),
        )
        for (shape, seed), ratio in zip(common, ratios, strict=True)
    ]
    numbers = ("baseline p50 µs", "candidate p50 µs", "speedup")
    average = math.exp(math.fsum(map(math.log, ratios)) / len(ratios))
    parts = [
        f"## {label[0]} ({label[1]})",
        formatting.table(("shape", "dims", "seed", *numbers), rows, right=numbers),
        f"**Average speedup** (geometric mean of {len(ratios)}): {_gate(average, required)}",
        "A ratio of p50s has no confidence interval: a verdict needs both sides timed interleaved in one run.",
    ]
    parts += [
        f"Only in the {side}: " + ", ".join(f"{shape} seed {seed}" for shape, seed in lone)
        for side, lone in (
            ("baseline", [k for k in base if k not in cand]),
            ("candidate", [k for k in cand if k not in base]),
        )
        if lone
    ]
    return "\n\n".join(parts)


def _gate(average: float, required: float | None) -> str:
    if required is None:
        return f"{formatting.speedup(average)}, nothing required"
    status = "PASS" if average >= required else "FAIL"
    return f"{formatting.speedup(average)}, required {formatting.requirement(required)}: {status}"

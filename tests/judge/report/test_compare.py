"""COMPARE.md: rows, average, gate, and what it refuses."""

from __future__ import annotations

import math

import pytest

from greenfast.judge.record_schema import TimingRow
from greenfast.judge.report.compare import compare_markdown, compare_timings
from greenfast.spec.errors import UsageError
from tests.judge.report.records import timing_row

BASE = [timing_row("small", 0, 20.0), timing_row("mission", 0, 300.0), timing_row("mission", 1, 400.0)]
CAND = [timing_row("mission", 1, 200.0), timing_row("mission", 0, 200.0), timing_row("long", 0, 900.0)]
AVERAGE = math.sqrt(1.5 * 2.0)


def markdown(baseline: list[TimingRow], candidate: list[TimingRow], *, required: float | None) -> str:
    """Return the page of a comparison."""
    return compare_markdown(compare_timings(baseline, candidate, required=required))


def test_rows_average_and_lone_pairs() -> None:
    text = markdown(BASE, CAND, required=1.15)
    assert "## graph slope (warm)" in text
    assert "| mission | B=1 H=8 S=512 D=64 | 0 | 300.0 | 200.0 | 1.500x |" in text
    assert "| mission | B=1 H=8 S=512 D=64 | 1 | 400.0 | 200.0 | 2.000x |" in text
    assert f"(geometric mean of 2): {AVERAGE:.3f}x, required 1.15x: PASS" in text
    assert "Only in the baseline: small seed 0\n" in text
    assert "Only in the candidate: long seed 0\n" in text
    assert sum(line.startswith("| small") or line.startswith("| long") for line in text.splitlines()) == 0


def test_the_gate() -> None:
    assert f"{AVERAGE:.3f}x, required 1.75x: FAIL" in markdown(BASE, CAND, required=1.75)
    assert f"{AVERAGE:.3f}x, nothing required" in markdown(BASE, CAND, required=None)
    assert "required 2x: PASS" in markdown(BASE[2:], CAND, required=2.0)
    assert "Only in" not in markdown(BASE, BASE, required=None)


def test_two_cache_states_of_both_sides_are_two_tables() -> None:
    def both(p50_us: float) -> list[TimingRow]:
        return [timing_row("mission", 0, p50_us), timing_row("mission", 0, 3 * p50_us, cache="cold")]

    text = markdown(both(300.0), both(100.0), required=None)
    cold, warm = text.split("## graph slope (warm)")
    assert "## graph slope (cold)" in cold
    assert "| 900.0 | 300.0 | 3.000x |" in cold
    assert "| 300.0 | 100.0 | 3.000x |" in warm


@pytest.mark.parametrize("change", [{"method": "events"}, {"cache": "cold"}])
def test_different_labels_are_refused_by_name(change: dict[str, str]) -> None:
    other = [timing_row("mission", 0, 100.0, **change)]
    with pytest.raises(UsageError, match="never mix two in one comparison") as caught:
        markdown(BASE, other, required=None)
    assert next(iter(change.values())) in str(caught.value)
    assert "graph slope" in str(caught.value)
    with pytest.raises(UsageError, match="never mix"):
        markdown(BASE, [*CAND, *other], required=None)


@pytest.mark.parametrize(
    ("base", "cand", "required", "message"),
    [
        ([], CAND, None, "baseline holds no timings"),
        (BASE, [], None, "candidate holds no timings"),
        (BASE, CAND, 0.15, "ratio >= 1"),
        ([*BASE, BASE[0]], CAND, None, "baseline holds small, seed 0 more than once"),
        ([BASE[0]], [CAND[2]], None, "in common"),
        (BASE, [timing_row("mission", 0, 1.0, dims={"B": 2})], None, "is B=1 H=8 S=512 D=64 in the baseline and B=2"),
        (BASE, [timing_row("mission", 0, 0.0)], None, "candidate, mission, seed 0: p50"),
    ],
)
def test_refusals(base: list[TimingRow], cand: list[TimingRow], required: float | None, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        markdown(base, cand, required=required)

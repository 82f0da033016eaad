"""Error measures against values worked out by hand; and cases that fail for one cause."""

from __future__ import annotations

import math

import numpy as np
import pytest

from greenfast.judge.error_metrics import (
    bound_histogram,
    error_histogram,
    error_stats,
    map_errors,
    worst_bound_ratio,
    worst_element,
)
from greenfast.judge.gates.correctness import group_by_cause
from tests.judge.report.records import correctness_row

REFERENCE = np.array([[4.0, -2.0], [0.001, 0.0]])
ACTUAL = np.array([[4.5, -2.0], [0.101, -0.25]])  # errors 0.5, 0, 0.1, 0.25


def test_every_statistic_by_hand() -> None:
    stats = error_stats(ACTUAL, REFERENCE, 0.2)
    assert stats.max_abs_err == 0.5
    assert stats.mean_abs_err == pytest.approx(0.85 / 4)
    # 0.001 and 0 are not above a thousandth of 4: their relative errors, 100 and infinity, do not count
    assert stats.max_rel_err == pytest.approx(0.125)
    assert stats.relative_error == pytest.approx(math.sqrt(0.25 + 0.01 + 0.0625) / math.sqrt(16 + 4 + 1e-6))
    assert stats.pct_bad == 50.0


def test_many_elements_are_measured_in_parts() -> None:
    generator = np.random.default_rng(0)
    exact = generator.standard_normal((7, 41, 1009))
    actual = exact + 1e-3 * generator.standard_normal(exact.shape) * (generator.random(exact.shape) < 0.7)
    bound = 1e-4 + 1e-3 * np.abs(exact)
    err, size = np.abs(actual - exact), np.abs(exact)
    stats, large = error_stats(actual, exact, 2e-3), size > 1e-3 * size.max()
    assert (stats.max_abs_err, stats.max_rel_err) == (err.max(), (err[large] / size[large]).max())
    assert stats.mean_abs_err == pytest.approx(err.mean(), rel=1e-12)
    assert stats.relative_error == pytest.approx(np.linalg.norm(err) / np.linalg.norm(exact), rel=1e-12)
    assert stats.pct_bad == pytest.approx(100 * (err > 2e-3).mean(), rel=1e-12)
    ratios = np.sort((err / bound).ravel())
    assert worst_bound_ratio(actual, exact, bound) == ratios[-1]
    assert worst_bound_ratio(actual, exact, bound, matched=0.9) == ratios[math.ceil(0.9 * ratios.size) - 1]
    assert worst_bound_ratio(actual, exact, bound, most=err.max()) == ratios[-1]
    assert worst_bound_ratio(actual, exact, bound, most=np.nextafter(err.max(), 0)) == math.inf
    counts = error_histogram(actual, exact).counts
    assert sum(counts) == exact.size
    assert counts[0] == (err < 1e-9).sum()
    assert sum(bound_histogram(actual, exact, bound).counts[21:]) == (ratios >= 1).sum()


def test_relative_error_of_elements_just_above_the_floor_counts() -> None:
    assert error_stats(np.array([1.0, 0.002]), np.array([1.0, 0.0011]), 1.0).max_rel_err == pytest.approx(9 / 11)


@pytest.mark.parametrize(("limit", "pct"), [(0.0, 75.0), (0.1, 50.0), (0.25, 25.0), (0.4999, 25.0), (0.5, 0.0)])
def test_an_error_at_the_limit_is_not_bad(limit: float, pct: float) -> None:
    reference = np.zeros(4)
    assert error_stats(np.array([0.5, 0.0, -0.1, 0.25]), reference, limit).pct_bad == pct


def test_equal_arrays_have_no_error() -> None:
    stats = error_stats(REFERENCE, REFERENCE, 0.0)
    assert {stats.max_abs_err, stats.mean_abs_err, stats.max_rel_err, stats.relative_error, stats.pct_bad} == {0.0}


def test_sign_of_the_error_does_not_matter() -> None:
    assert error_stats(2 * REFERENCE - ACTUAL, REFERENCE, 0.2) == error_stats(ACTUAL, REFERENCE, 0.2)


def test_zero_reference() -> None:
    assert error_stats(np.zeros(3), np.zeros(3), 0.1).relative_error == 0.0
    stats = error_stats(np.full(3, 0.5), np.zeros(3), 0.1)
    assert stats.relative_error == math.inf
    assert (stats.max_abs_err, stats.mean_abs_err, stats.pct_bad) == (0.5, 0.5, 100.0)


def test_no_elements() -> None:
    stats = error_stats(np.zeros((0, 4)), np.zeros((0, 4)), 0.1)
    assert (stats.max_abs_err, stats.mean_abs_err, stats.relative_error, stats.pct_bad) == (0.0, 0.0, 0.0, 0.0)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_values_that_are_not_finite_have_no_statistics(bad: float) -> None:
    broken = REFERENCE.copy()
    broken[1, 0] = bad
    with pytest.raises(ValueError, match="NaN or infinity"):
        error_stats(broken, REFERENCE, 0.1)
    with pytest.raises(ValueError, match="NaN or infinity"):
        error_stats(REFERENCE, broken, 0.1)


def test_shapes_are_not_broadcast() -> None:
    with pytest.raises(ValueError, match=r"\(2, 2\) and \(2,\)"):
        error_stats(REFERENCE, REFERENCE[0], 0.1)


# The bound ratio


@pytest.mark.parametrize(
    ("errors", "bounds", "worst"),
    [
        ([0.0, 0.5, -0.3], [1.0, 2.0, 0.1], 3.0),
        ([0.5, 0.25], [1.0, 0.25], 1.0),
        ([0.0, 0.0], [0.0, 1.0], 0.0),
        ([0.0, 1e-300], [0.0, 0.0], math.inf),
        ([1.0, -1.0], [math.inf, 4.0], 0.25),
        ([], [], 0.0),
    ],
)
def test_worst_bound_ratio(errors: list[float], bounds: list[float], worst: float) -> None:
    exact = np.zeros(len(errors))
    assert worst_bound_ratio(exact + errors, exact, np.array(bounds)) == pytest.approx(worst)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_value_that_is_not_finite_is_within_no_bound(bad: float) -> None:
    ratio = worst_bound_ratio(np.array([0.0, bad]), np.zeros(2), np.ones(2))
    assert not ratio <= 1.0
    for place in (0, 400_000):  # in the first of several parts, and in the last
        actual = np.full(400_001, 0.5)
        actual[place] = bad
        assert not worst_bound_ratio(actual, np.zeros(400_001), np.ones(400_001)) <= 1.0


def test_squares_of_huge_values_are_infinite() -> None:
    """As of -1e150, which stands for an infinity that both have."""
    exact = np.full(400_000, -1e154)
    assert error_stats(exact, exact, 1.0).relative_error == 0.0
    assert error_stats(exact + 1e140, exact, 1.0).relative_error == 0.0


def test_histograms_by_hand() -> None:
    exact = np.zeros(6)
    actual = np.array([0.0, 1e-5, -0.9e-5, 2.0, 150.0, 1.0])
    found = error_histogram(actual, exact)
    assert (found.first, found.per_decade, sum(found.counts)) == (-9, 2, 6)
    assert len(found.counts) == 2 * 11 + 2
    # 0 is below all edges; 1e-5 on the ninth edge, 0.9e-5 below it; 1 on the 19th, 2 above it; 150 beyond the last
    assert {i: n for i, n in enumerate(found.counts) if n} == {0: 1, 8: 1, 9: 1, 19: 2, 23: 1}


def test_a_histogram_of_bounds_has_every_element() -> None:
    found = bound_histogram(np.array([0.0, 1.0, 1.0, 0.5]), np.zeros(4), np.array([0.0, 0.0, 2.0, 1.0]))
    assert (found.counts[0], found.counts[-1], sum(found.counts)) == (1, 1, 4)  # 0/0 is no error, 1/0 beyond all
    edges = 10.0 ** (found.first + np.arange(len(found.counts) - 1) / found.per_decade)
    (index,) = [i for i, n in enumerate(found.counts) if n == 2]
    assert edges[index - 1] <= 0.5 < edges[index]


def test_the_worst_element_has_a_place_and_its_numbers() -> None:
    exact = np.zeros((2, 3))
    actual = np.array([[0.0, 0.5, 0.0], [4604.0, 0.0, 0.2]])
    bound = np.full((2, 3), 0.1)
    found = worst_element(actual, exact, bound, {"y": actual.astype(np.float32)})
    assert str(found) == "y[1, 0]: got 4604, expected 0, allowed 0.1; 50 % of elements wrong"
    parts = {"a": actual[0], "b": np.zeros(0), "c": actual[1]}
    in_parts = worst_element(actual, exact, bound, parts)
    assert in_parts is not None
    assert (in_parts.output, in_parts.index) == ("c", [0])
    # Where the decoded array is not the buffers one after the other, the place is that of the decoded array.
    swapped = {"a": actual[1], "c": actual[0]}
    assert str(worst_element(actual, exact, bound, swapped)).startswith("output[1, 0]: got 4604")


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_an_element_that_is_not_finite_is_the_worst(value: float) -> None:
    actual, exact = np.array([1e300, 0.0, value, 2.0]), np.zeros(4)
    found = worst_element(actual, exact, np.full(4, math.inf), {"x": actual})
    assert found is not None
    assert (found.index, found.got, found.allowed, found.wrong) == ([2], None, None, 0.25)


def test_the_worst_element_of_nothing_wrong_and_of_a_zero_bound() -> None:
    zeros = np.zeros(5)
    assert "no element wrong" in str(worst_element(zeros, zeros, zeros, {"x": zeros}))
    off = np.array([0, 0, 0, 1e-30, 0])
    assert str(worst_element(off, zeros, zeros, {"x": off})).startswith("x[3]: got 1e-30")
    assert worst_element(zeros[:0], zeros[:0], zeros[:0], {"x": zeros[:0]}) is None


FAULT = "run: k: {}-byte read out of bounds: byte {} of 'x' (400 bytes) at k.cu:{}, block ({}, 0, 0)"


@pytest.mark.parametrize(
    ("notes", "groups"),
    [
        ([FAULT.format(4, 400, 7, 0), FAULT.format(4, 8192, 7, 12)], [(0, "; 1 more of 2 cases fail alike")]),
        ([FAULT.format(4, 400, 7, 0), FAULT.format(4, 400, 8, 0)], [(0, ""), (1, "")]),
        (["hang", "not run: hang", "not run: hang"], [(0, "; 2 more of 3 cases were not run")]),
        (
            [FAULT.format(4, 1, 7, 0), FAULT.format(4, 2, 7, 1), f"not run: {FAULT.format(4, 2, 7, 1)}"],
            [(0, "; 1 more of 3 cases fail alike; 1 were not run")],
        ),
    ],
)
@pytest.mark.parametrize("gates", [{"ran_pass": False}, {}], ids=["wrong", "unsupported"])
def test_cases_of_one_cause_are_one_group(
    notes: list[str], groups: list[tuple[int, str]], gates: dict[str, bool]
) -> None:
    rows = [correctness_row("small", seed, gates=gates, notes=[note]) for seed, note in enumerate(notes)]
    expected = [(rows[n], more if gates else more.replace("fail alike", "alike")) for n, more in groups]
    assert group_by_cause(rows) == expected


def test_wrong_values_are_one_cause_and_cases_that_passed_are_none() -> None:
    values = {"finite_pass": True, "kernel_bound_pass": False}
    wrong = [correctness_row("small", seed, gates=values, notes=[f"y[{seed}]: got nan"]) for seed in range(3)]
    passed = correctness_row("small", 3, gates={"finite_pass": True})
    assert group_by_cause([passed, *wrong]) == [(wrong[0], "; 2 more of 4 cases fail alike")]


def test_the_map_of_errors_shows_where_an_output_is_wrong() -> None:
    """Two outputs in one array: the second has a wrong column, and one element that is not finite."""
    exact = np.arange(100 + 30 * 70, dtype=np.float64)
    actual = exact.copy()
    second = actual[100:].reshape(30, 70)
    second[:, 69] += 5
    outputs = {"y": actual[:100].copy(), "z": second.copy()}
    allowed = np.full_like(exact, 0.5)
    found = map_errors(actual, exact, allowed, outputs)
    assert found is not None
    assert (found.output, found.rows, found.columns) == ("z", 30, 70)
    assert (len(found.cells), len(found.cells[0])) == (16, 32)
    assert {row[-1] for row in found.cells} == {10.0}
    assert {cell for row in found.cells for cell in row[:-1]} == {0.0}
    assert (found.top, found.left) == (0, 67)
    assert found.got[0] == [167.0, 168.0, 174.0]
    assert found.expected[0] == [167.0, 168.0, 169.0]
    second[10, 20] = np.nan
    found = map_errors(actual, exact, allowed, outputs | {"z": second.copy()})
    assert found is not None
    assert (found.top, found.left, found.got[2][2]) == (8, 18, None)
    assert sum(cell is None for row in found.cells for cell in row) == 1
    assert map_errors(exact, exact, allowed, outputs) is None

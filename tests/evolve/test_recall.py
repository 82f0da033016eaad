"""What a screen keeps of the best, on made-up pairs of times and estimates."""

from __future__ import annotations

import random

import pytest
from scipy import stats

from greenfast.evolve import t4
from greenfast.evolve.recall import kept_of_best, recall, spearman
from greenfast.spec.errors import UsageError


def results(pairs: list[tuple[float, float]]) -> t4.Results:
    def row(n: int, time: float, estimate: float) -> t4.Result:
        figures = {t4.TIME: time, t4.ESTIMATE: estimate}
        return t4.Result(
            configuration={"n": n},
            times=t4.Times(),
            invalidity="correct",
            correctness=1,
            measurements=[t4.Measurement(name=name, value=value) for name, value in figures.items()],
        )

    return t4.Results(results=[row(n, *pair) for n, pair in enumerate(pairs)])


@pytest.mark.parametrize(
    ("estimates", "kept"),
    [
        ([1, 2, 3, 4, 5, 6, 7, 8, 9, 10], 5),
        ([10, 9, 8, 7, 6, 5, 4, 3, 2, 1], 0),
        ([6, 1, 2, 3, 4, 5, 7, 8, 9, 10], 4),
        ([1, 1, 1, 1, 1, 1, 1, 1, 1, 1], 0),  # equal estimates tell nothing
        ([1, 1, 1, 1, 1, 9, 9, 9, 9, 9], 5),
    ],
)
def test_the_best_that_are_in_the_better_half_are_kept(estimates: list[float], kept: int) -> None:
    assert kept_of_best([(float(n), e) for n, e in enumerate(estimates)], best=5, share=0.5) == kept


@pytest.mark.parametrize("values", [1000, 5])
def test_spearman_is_scipys(values: int) -> None:
    rng = random.Random(0)
    pairs = [(float(rng.randrange(values)), float(rng.randrange(values))) for _ in range(60)]
    pairs = [(a, a + b) for a, b in pairs]
    expected = stats.spearmanr([a for a, _ in pairs], [b for _, b in pairs]).statistic
    assert spearman(pairs) == pytest.approx(expected, abs=1e-12)


def test_a_perfect_screen_is_enough_and_a_random_one_is_not() -> None:
    rng = random.Random(0)
    times = [rng.random() for _ in range(100)]
    perfect = recall(results([(t, 3 * t) for t in times]))
    assert (perfect.kept, perfect.in_batches, round(perfect.order, 9), perfect.enough) == (5, 1.0, 1.0, True)
    noise = recall(results([(t, rng.random()) for t in times]))
    assert noise.in_batches == pytest.approx(0.5, abs=0.15)
    assert not noise.enough


def test_few_kernels_tell_nothing() -> None:
    with pytest.raises(UsageError, match="9 configurations have a time and an estimate; at least 10 are needed"):
        recall(results([(1.0, 1.0)] * 9))

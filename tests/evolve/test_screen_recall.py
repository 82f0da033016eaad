"""What a screen keeps of the best, on made-up pairs of times and estimates."""

from __future__ import annotations

import random

import pytest
from scipy import stats

from greenfast.evolve import t4
from greenfast.evolve.screen_recall import count_best_kept, measure_recall, spearman
from greenfast.spec.errors import UsageError


def results(pairs: list[tuple[float, float]]) -> t4.T4Results:
    def row(n: int, time: float, estimate: float) -> t4.T4Result:
        figures = {t4.TIME: time, t4.ESTIMATE: estimate}
        return t4.T4Result(
            configuration={"n": n},
            times=t4.T4Times(),
            invalidity="correct",
            correctness=1,
            measurements=[t4.T4Measurement(name=name, value=value) for name, value in figures.items()],
        )

    return t4.T4Results(results=[row(n, *pair) for n, pair in enumerate(pairs)])


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
    assert count_best_kept([(float(n), e) for n, e in enumerate(estimates)], best=5, share=0.5) == kept


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
    perfect = measure_recall(results([(t, 3 * t) for t in times]))
    assert (perfect.kept, round(perfect.in_batches, 3), round(perfect.order, 9), perfect.enough) == (5, 1.0, 1.0, True)
    noise = measure_recall(results([(t, rng.random()) for t in times]))
    assert noise.in_batches < 0.95
    assert not noise.enough


@pytest.mark.parametrize("batch", [4, 7, 10])
def test_the_chance_in_a_batch_is_that_of_draws(batch: int) -> None:
    rng = random.Random(1)
    pairs = [(float(n), rng.random()) for n in range(20)]
    kept = 0
    for draw in range(20_000):
        drawn = [pairs[draw % 5], *rng.sample([p for p in pairs if p != pairs[draw % 5]], batch - 1)]
        kept += pairs[draw % 5] in sorted(drawn, key=lambda p: p[1])[: -(-batch // 2)]
    assert measure_recall(results(pairs), batch=batch).in_batches == pytest.approx(kept / 20_000, abs=0.015)


def test_few_kernels_tell_nothing() -> None:
    with pytest.raises(UsageError, match="9 configurations have a time and an estimate; at least 10 are needed"):
        measure_recall(results([(1.0, 1.0)] * 9))

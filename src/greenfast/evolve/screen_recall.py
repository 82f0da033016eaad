"""Measure the recall of the screen: the share of the best kernels in the better half by estimate, on cached times."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from greenfast.evolve import t4
from greenfast.spec.errors import UsageError

#: Required recall on kernel families it was not tuned on before a screen is on by default.
REQUIRED_RECALL = 0.95
#: Default number of candidates per screened batch.
BATCH = 8


class Recall(msgspec.Struct, frozen=True, kw_only=True):
    """The recall on one cache.

    kernels: those with a time and an estimate. kept: best kernels that pass if the whole cache is screened at once.
    in_batches: exact mean probability that a best kernel passes in a batch with random others, as in a search. order:
    Spearman's rank correlation of estimates and times.
    """

    kernels: int
    best: int
    kept: int
    in_batches: float
    order: float

    @property
    def enough(self) -> bool:
        """Whether the recall on this cache allows the screen to be on by default."""
        return self.kept / self.best >= REQUIRED_RECALL and self.in_batches >= REQUIRED_RECALL


def measure_recall(results: t4.T4Results, *, best: int = 5, share: float = 0.5, batch: int = BATCH) -> Recall:
    """Measure the recall of a screen that keeps the ``share`` with the lowest estimates.

    All correct configurations with the measurements ``time`` and ``estimate`` count. Raises UsageError for fewer than
    ten of them, or fewer than twice ``best``.
    """
    rows = [r.measured for r in results.results if r.invalidity == "correct"]
    pairs = [(float(m[t4.TIME]), float(m[t4.ESTIMATE])) for m in rows if t4.TIME in m and t4.ESTIMATE in m]
    least = max(10, 2 * best)
    if len(pairs) < least:
        raise UsageError(f"{len(pairs)} configurations have a time and an estimate; at least {least} are needed")
    size = min(batch, len(pairs))
    places = [_by_estimate(pairs).index(pair) for pair in sorted(pairs)[:best]]
    return Recall(
        kernels=len(pairs),
        best=best,
        kept=count_best_kept(pairs, best, share),
        in_batches=sum(_chance_of_survival(place, len(pairs), size, share) for place in places) / best,
        order=spearman(pairs),
    )


def _chance_of_survival(rank: int, count: int, size: int, share: float) -> float:
    """Return the probability that the kernel of rank ``rank`` among ``count`` passes in a random batch of ``size``."""
    num_kept = math.ceil(share * size)
    ways = sum(math.comb(rank, n) * math.comb(count - 1 - rank, size - 1 - n) for n in range(num_kept))
    return ways / math.comb(count - 1, size - 1)


def count_best_kept(pairs: Sequence[tuple[float, float]], best: int, share: float) -> int:
    """Count the pairs among the ``best`` lowest times that are also in the ``share`` with the lowest estimates.

    pairs: time and estimate. Among equal estimates at the border the slower ones are passing: the worst case.
    """
    passing = _by_estimate(pairs)[: math.ceil(share * len(pairs))]
    return sum(pair in passing for pair in sorted(pairs)[:best])


def _by_estimate(pairs: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    return sorted(pairs, key=lambda pair: (pair[1], -pair[0]))


def spearman(pairs: Sequence[tuple[float, float]]) -> float:
    """Return Spearman's rank correlation. Equal values share their mean rank; 0 if one side is constant."""
    ranks = [_ranks([pair[side] for pair in pairs]) for side in (0, 1)]
    middle = (len(pairs) - 1) / 2
    a, b = ([rank - middle for rank in side] for side in ranks)
    scale = math.sqrt(sum(x * x for x in a) * sum(y * y for y in b))
    return sum(x * y for x, y in zip(a, b, strict=True)) / scale if scale else 0.0


def _ranks(values: Sequence[float]) -> list[float]:
    order = sorted(range(len(values)), key=lambda n: values[n])
    ranks = [0.0] * len(values)
    start = 0
    for end in range(1, len(order) + 1):
        if end == len(order) or values[order[end]] != values[order[start]]:
            for n in order[start:end]:
                ranks[n] = (start + end - 1) / 2
            start = end
    return ranks

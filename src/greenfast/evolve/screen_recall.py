"""What a screen is worth: how many of the best a half of the evaluations keeps, on a cache of times and counts."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from greenfast.evolve import t4
from greenfast.spec.errors import UsageError

#: A screen is on by default where it keeps this share of the best on families that it was not tuned on.
ENOUGH = 0.95
#: Candidates that a search screens at a time by default.
BATCH = 8


class Recall(msgspec.Struct, frozen=True, kw_only=True):
    """Of one cache. kernels: with a time and an estimate. kept: of the best, with the whole cache screened at once.

    in_batches: the mean chance, exactly, that one of the best is kept where it is screened in a batch with others drawn
    at random, as a search does it. order: Spearman's rank correlation of estimates and times.
    """

    kernels: int
    best: int
    kept: int
    in_batches: float
    order: float

    @property
    def enough(self) -> bool:
        """Whether the screen may be on by default, as far as this cache tells."""
        return self.kept / self.best >= ENOUGH and self.in_batches >= ENOUGH


def recall(results: t4.T4Results, *, best: int = 5, share: float = 0.5, batch: int = BATCH) -> Recall:
    """What a screen that keeps the share with the least estimates is worth on a cache.

    Every right configuration counts that has the measurements ``time`` and ``estimate``. Raises UsageError where there
    are fewer than ten, or fewer than twice ``best``.
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
        kept=kept_of_best(pairs, best, share),
        in_batches=sum(_chance(place, len(pairs), size, share) for place in places) / best,
        order=spearman(pairs),
    )


def _chance(place: int, count: int, size: int, share: float) -> float:
    """That a kernel with ``place`` others of ``count`` before it is kept among ``size`` that are drawn with it."""
    kept = math.ceil(share * size)
    ways = sum(math.comb(place, n) * math.comb(count - 1 - place, size - 1 - n) for n in range(kept))
    return ways / math.comb(count - 1, size - 1)


def kept_of_best(pairs: Sequence[tuple[float, float]], best: int, share: float) -> int:
    """Of the ``best`` pairs with the least times, those among the share with the least estimates.

    pairs: time and estimate. Of equal estimates at the border the slower ones are kept: the worst that can happen.
    """
    kept = _by_estimate(pairs)[: math.ceil(share * len(pairs))]
    return sum(pair in kept for pair in sorted(pairs)[:best])


def _by_estimate(pairs: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    return sorted(pairs, key=lambda pair: (pair[1], -pair[0]))


def spearman(pairs: Sequence[tuple[float, float]]) -> float:
    """Spearman's rank correlation; equal values share the mean of their ranks. 0 where one side is constant."""
    ranks = [_ranks([pair[side] for pair in pairs]) for side in (0, 1)]
    middle = (len(pairs) - 1) / 2
    a, b = ([rank - middle for rank in side] for side in ranks)
    scale = math.sqrt(sum(x * x for x in a) * sum(y * y for y in b))
    return sum(x * y for x, y in zip(a, b, strict=True)) / scale if scale else 0.0


def _ranks(values: Sequence[float]) -> list[float]:
    order = sorted(range(len(values)), key=lambda n: values[n])
    found = [0.0] * len(values)
    start = 0
    for end in range(1, len(order) + 1):
        if end == len(order) or values[order[end]] != values[order[start]]:
            for n in order[start:end]:
                found[n] = (start + end - 1) / 2
            start = end
    return found

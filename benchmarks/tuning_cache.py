"""Simulate searches on caches of measured kernels (T4 files), and measure a screen by estimates there."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from greenfast.evolve import t4
from greenfast.evolve.proposal import Candidate, Context, Descriptor, Evaluation, Proposer, Stage, select_best
from greenfast.evolve.space import Parameter, Space, Value
from greenfast.spec.errors import UsageError

Setting = tuple[Value, ...]
_STAGE_OF_INVALIDITY: dict[str, Stage] = {
    "compile": "BUILD",
    "correctness": "CORRECTNESS",
    "timeout": "race",
    "runtime": "race",
}


class CacheSpace(Space, frozen=True, kw_only=True):
    """The space of a cache: only its settings are allowed. settings: values in the order of the parameters."""

    settings: frozenset[Setting]

    def violated(self, complete: Mapping[str, Value]) -> str | None:
        """Return a constraint in words if the setting is not in the cache."""
        return None if tuple(complete.values()) in self.settings else "is in the cache"


class Cache:
    """The evaluation of every setting in a T4 file.

    space: the space of the settings. evaluations: by setting; its values are in the order of the space's parameters.
    """

    def __init__(self, results: t4.T4Results, name: str = "cache") -> None:
        """Raises UsageError if no configuration is correct, or if they have different parameters."""
        rows = [r for r in results.results if r.invalidity != "constraints"]
        names = list(rows[0].configuration) if rows else []
        if any(r.configuration.keys() != set(names) for r in rows):
            raise UsageError(f"{name}: its configurations have different parameters")
        self.evaluations = {tuple(r.configuration[n] for n in names): _evaluation(r, names) for r in rows}
        values = {n: _sort_values({s[i] for s in self.evaluations}) for i, n in enumerate(names)}
        self.space = CacheSpace(
            name=name,
            parameters={n: Parameter(values=v) for n, v in values.items()},
            settings=frozenset(self.evaluations),
        )
        best = select_best(list(self.evaluations.values()))
        if best is None or not best.fitness:
            raise UsageError(f"{name}: none of its {len(rows)} configurations is right and has a time")
        self.best: float = best.fitness

    def evaluate(self, candidate: Candidate) -> Evaluation:
        """Look up the evaluation of a candidate."""
        complete = self.space.complete(candidate.parameters)
        known = self.evaluations.get(tuple(complete.values()))
        if known is None:
            return Evaluation(candidate=candidate, stage="space", valid=False, feedback="not in the cache")
        return Evaluation(
            candidate=candidate,
            hash=known.hash,
            stage=known.stage,
            valid=known.valid,
            fitness=known.fitness,
            fitness_kind=known.fitness_kind,
            behaviour=known.behaviour,
        )

    def near(self, share: float) -> frozenset[Setting]:
        """Return the settings with at least this share of the best speed: 0.99 is at most 1 / 0.99 of the best time."""
        return frozenset(
            s for s, e in self.evaluations.items() if e.valid and e.fitness and self.best / e.fitness >= share
        )


def search(
    proposer: Proposer, cache: Cache, *, seed: int, evaluations: int, until: float = 0.0, batch: int = 1
) -> list[Evaluation]:
    """Run a search; return its evaluations in order.

    evaluations: the limit. until: end at this share of the best speed; 0 for never. batch: candidates per proposal.
    """
    rng = random.Random(seed)
    good = cache.near(until) if until else frozenset()
    history: list[Evaluation] = []
    while (remaining := evaluations - len(history)) > 0:
        context = Context(
            space=cache.space,
            task=cache.space.name,
            wanted=min(batch, remaining),
            seed=rng.getrandbits(63),
            history=tuple(history),
        )
        batch_evaluations = [cache.evaluate(candidate) for candidate in proposer.propose(context)[: context.wanted]]
        if not batch_evaluations:
            break
        proposer.observe(batch_evaluations)
        history += batch_evaluations
        if any(tuple(e.candidate.parameters.values()) in good for e in batch_evaluations):
            break
    return history


def count_evaluations(
    make: Callable[[], Proposer], cache: Cache, seeds: Iterable[int], share: float = 0.99
) -> list[int]:
    """Return for each seed the number of evaluations until a share of the best speed is reached."""
    total = len(cache.evaluations)
    return [len(search(make(), cache, seed=seed, evaluations=total, until=share)) for seed in seeds]


def median_of_random_draws(cache: Cache, share: float = 0.99) -> int:
    """Return the exact median of evaluations that random draws without replacement need for a share of the best speed.

    It is the smallest n with C(N - k, n) / C(N, n) <= 1/2, the probability that n of N draws miss all k good settings.
    """
    total, good = len(cache.evaluations), len(cache.near(share))
    missed, drawn = 1.0, 0
    while missed > 0.5:
        missed *= (total - good - drawn) / (total - drawn)
        drawn += 1
    return drawn


def _evaluation(result: t4.T4Result, names: Sequence[str]) -> Evaluation:
    figures = {name: value for name, value in result.measured.items() if not isinstance(value, str)}
    right = result.invalidity == "correct" and t4.TIME in figures
    known = t4.SMEM in figures and t4.REGISTERS in figures
    return Evaluation(
        candidate=Candidate(parameters={n: result.configuration[n] for n in names}),
        stage="validate" if right else _STAGE_OF_INVALIDITY.get(result.invalidity, "race"),
        valid=right,
        fitness=figures[t4.TIME] / 1e3 if right else None,
        fitness_kind="seconds" if right else "",
        behaviour=Descriptor(
            pipe=str(result.measured.get(t4.PIPE, "")),
            smem_bytes=int(figures[t4.SMEM]),
            registers=int(figures[t4.REGISTERS]),
        )
        if known
        else None,
    )


def _sort_values(values: set[Value]) -> tuple[Value, ...]:
    """Sort numbers by size, then texts."""
    return tuple(sorted(values, key=lambda v: (isinstance(v, str), v if isinstance(v, str) else float(v))))


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


def measure_recall(results: t4.T4Results, *, best: int = 5, share: float = 0.5, batch: int) -> Recall:
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
    # Among equal estimates the slower ones come first: the worst case.
    by_estimate = sorted(pairs, key=lambda pair: (pair[1], -pair[0]))
    ranks = [by_estimate.index(pair) for pair in sorted(pairs)[:best]]
    return Recall(
        kernels=len(pairs),
        best=best,
        kept=sum(rank < math.ceil(share * len(pairs)) for rank in ranks),
        in_batches=sum(_chance_of_survival(rank, len(pairs), size, share) for rank in ranks) / best,
        order=spearman(pairs),
    )


def _chance_of_survival(rank: int, count: int, size: int, share: float) -> float:
    """Return the probability that the kernel of rank ``rank`` among ``count`` passes in a random batch of ``size``."""
    num_kept = math.ceil(share * size)
    ways = sum(math.comb(rank, n) * math.comb(count - 1 - rank, size - 1 - n) for n in range(num_kept))
    return ways / math.comb(count - 1, size - 1)


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

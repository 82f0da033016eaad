"""A search on a cache: every evaluation is looked up in a T4 file, so that proposers can be compared without a GPU."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence

from greenfast.evolve import t4
from greenfast.evolve.proposal import Candidate, Context, Descriptor, Evaluation, Proposer, Stage, select_best
from greenfast.evolve.space import Parameter, Space, Value
from greenfast.spec.errors import UsageError

Setting = tuple[Value, ...]
_OF_STAGE: dict[str, Stage] = {"compile": "BUILD", "correctness": "CORRECTNESS", "timeout": "race", "runtime": "race"}


class CacheSpace(Space, frozen=True, kw_only=True):
    """The settings of a cache: what is not in it no constraint allows. settings: in the order of the parameters."""

    settings: frozenset[Setting]

    def violated(self, complete: Mapping[str, Value]) -> str | None:
        """What a setting that is not in the cache breaks."""
        return None if tuple(complete.values()) in self.settings else "is in the cache"


class Cache:
    """What is known of every setting.

    space: their space. evaluations: by setting, its values in the order of the space's parameters.
    """

    def __init__(self, results: t4.T4Results, name: str = "cache") -> None:
        """Raises UsageError where no configuration is right, or they have different parameters."""
        rows = [r for r in results.results if r.invalidity != "constraints"]
        names = list(rows[0].configuration) if rows else []
        if any(r.configuration.keys() != set(names) for r in rows):
            raise UsageError(f"{name}: its configurations have different parameters")
        self.evaluations = {tuple(r.configuration[n] for n in names): _evaluation(r, names) for r in rows}
        values = {n: _in_order({s[i] for s in self.evaluations}) for i, n in enumerate(names)}
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
        """What is known of a candidate."""
        complete = self.space.complete(candidate.parameters)
        found = self.evaluations.get(tuple(complete.values()))
        if found is None:
            return Evaluation(candidate=candidate, stage="space", valid=False, feedback="not in the cache")
        return Evaluation(
            candidate=candidate,
            hash=found.hash,
            stage=found.stage,
            valid=found.valid,
            fitness=found.fitness,
            fitness_kind=found.fitness_kind,
            behaviour=found.behaviour,
        )

    def near(self, share: float) -> frozenset[Setting]:
        """The settings that reach a share of the best speed: 0.99 for at most 1 / 0.99 of the least time."""
        return frozenset(
            s for s, e in self.evaluations.items() if e.valid and e.fitness and self.best / e.fitness >= share
        )


def search(
    proposer: Proposer, cache: Cache, *, seed: int, evaluations: int, until: float = 0.0, batch: int = 1
) -> list[Evaluation]:
    """The evaluations of a search, in order.

    evaluations: at most so many. until: it ends once this share of the best speed is reached; 0 for never. batch: how
    many are proposed at once.
    """
    chance = random.Random(seed)
    good = cache.near(until) if until else frozenset()
    history: list[Evaluation] = []
    while (left := evaluations - len(history)) > 0:
        context = Context(
            space=cache.space,
            task=cache.space.name,
            wanted=min(batch, left),
            seed=chance.getrandbits(63),
            history=tuple(history),
            evaluations_left=left,
        )
        found = [cache.evaluate(candidate) for candidate in proposer.propose(context)[: context.wanted]]
        if not found:
            break
        proposer.observe(found)
        history += found
        if any(tuple(e.candidate.parameters.values()) in good for e in found):
            break
    return history


def needed(make: Callable[[], Proposer], cache: Cache, seeds: Iterable[int], share: float = 0.99) -> list[int]:
    """For each seed, the evaluations until a share of the best speed is reached."""
    most = len(cache.evaluations)
    return [len(search(make(), cache, seed=seed, evaluations=most, until=share)) for seed in seeds]


def median_by_chance(cache: Cache, share: float = 0.99) -> int:
    """The median of the evaluations that random draws without repetition need for a share of the best speed, exactly.

    The least n for which C(N - k, n) / C(N, n), the chance that none of n draws out of N is among the k good ones, is
    at most one half.
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
        stage="validate" if right else _OF_STAGE.get(result.invalidity, "race"),
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


def _in_order(values: set[Value]) -> tuple[Value, ...]:
    """Numbers by size, and texts behind them."""
    return tuple(sorted(values, key=lambda v: (isinstance(v, str), v if isinstance(v, str) else float(v))))

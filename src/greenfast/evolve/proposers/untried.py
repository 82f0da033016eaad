"""Settings of a space that were not evaluated yet, which is all that the searching proposers propose."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice

from greenfast.evolve.proposal import Evaluation
from greenfast.evolve.space import MOST_LISTED, MOST_STEPS, Space, Value

Point = dict[str, Value]
#: Draws before settings are listed.
_TRIES = 30


class Untried:
    """Remembers the settings of all evaluations, and draws others."""

    def __init__(self) -> None:
        """Nothing is evaluated yet."""
        self._taken: set[tuple[Value, ...]] = set()
        self._allowed: list[Point] | None = None

    def observe(self, evaluations: Iterable[Evaluation]) -> None:
        """Remember the settings of evaluations."""
        self._taken |= {_identity(e.candidate.parameters) for e in evaluations}

    def fresh(self, point: Mapping[str, Value], batch: Sequence[Point] = ()) -> bool:
        """Whether a complete setting was neither evaluated nor is in the batch that is being made."""
        return _identity(point) not in self._taken and point not in batch

    def draw(self, space: Space, rng: random.Random, batch: Sequence[Point] = ()) -> Point | None:
        """A fresh setting that the constraints allow, evenly drawn; None where none was found.

        Where 30 draws hit none, one of the first MOST_LISTED of the space; when these are taken, it counts as used up.
        """
        for _ in range(_TRIES):
            if self.fresh(point := space.sample(rng), batch):
                return point
        if self._allowed is None:
            self._allowed = list(islice(space.listed(MOST_STEPS), MOST_LISTED))
        left = [point for point in self._allowed if self.fresh(point, batch)]
        return rng.choice(left) if left else None


def _identity(point: Mapping[str, Value]) -> tuple[Value, ...]:
    return tuple(value for _, value in sorted(point.items()))

"""Track evaluated settings, and draw new ones."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice

from greenfast.evolve.proposal import Evaluation
from greenfast.evolve.space import MAX_LISTED, MAX_STEPS, Space, Value

Point = dict[str, Value]
#: Random draws before the settings are listed.
_TRIES = 30


class Untried:
    """Remembers the settings of all evaluations and draws new ones."""

    def __init__(self) -> None:
        """Start without evaluations."""
        self._taken: set[tuple[Value, ...]] = set()
        self._allowed: list[Point] | None = None

    def observe(self, evaluations: Iterable[Evaluation]) -> None:
        """Remember the settings of evaluations."""
        self._taken |= {_identity(e.candidate.parameters) for e in evaluations}

    def fresh(self, point: Mapping[str, Value], batch: Sequence[Point] = ()) -> bool:
        """Return whether a complete setting was not evaluated and is not in the current batch."""
        return _identity(point) not in self._taken and point not in batch

    def draw(self, space: Space, rng: random.Random, batch: Sequence[Point] = ()) -> Point | None:
        """Draw a new allowed setting uniformly; None if none is left.

        Where 30 draws hit none, one of the first MOST_LISTED of the space; when these are taken, it counts as used up.
        """
        for _ in range(_TRIES):
            if self.fresh(point := space.sample(rng), batch):
                return point
        if self._allowed is None:
            self._allowed = list(islice(space.listed(MAX_STEPS), MAX_LISTED))
        left = [point for point in self._allowed if self.fresh(point, batch)]
        return rng.choice(left) if left else None


def _identity(point: Mapping[str, Value]) -> tuple[Value, ...]:
    return tuple(value for _, value in sorted(point.items()))

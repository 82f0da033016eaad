"""Evolution on islands, each with an archive of the best candidate for every measured behaviour.

The archive is MAP-Elites' (Mouret and Clune 2015). A cell is what limits a kernel: its busiest pipe, and how many
blocks its shared memory and its registers leave to a multiprocessor.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence

import msgspec

from greenfast.evolve.proposal import Candidate, Context, Descriptor, Evaluation
from greenfast.evolve.proposers.untried import Point, Untried
from greenfast.evolve.space import Space

Cell = tuple[str, int, int]
#: More keep what they find apart, which pays in large spaces alone (docs/evolve-proposers.md).
ISLANDS = 1
_ORIGIN = "island "
_STARTUP = 1  # by chance, of each island
_EVERY = 8  # proposals of an island between two whose parent comes from the island before it
_TRIES, _WIDER = 16, 5  # to make a child that is fresh; after so many another parameter is changed too
# How often two elites are crossed, a second parameter is changed, and a value moves by one place.
_CROSSED, _TWICE, _NEAR = 0.2, 0.1, 0.5
_SMEM_STEP, _REGISTER_STEP = 32 * 1024, 32


def cell_of(behaviour: Descriptor | None) -> Cell:
    """The cell of a behaviour: its pipe, its shared memory in steps of 32 KiB, its registers in steps of 32."""
    found = behaviour or Descriptor()
    return found.pipe, math.ceil(found.smem_bytes / _SMEM_STEP), math.ceil(found.registers / _REGISTER_STEP)


def order(evaluation: Evaluation) -> tuple[bool, float]:
    """What valid evaluations are sorted by, the best first: measured ones come before estimates."""
    return evaluation.fitness_kind != "seconds", math.inf if evaluation.fitness is None else evaluation.fitness


class Archive:
    """The best valid evaluation of each cell."""

    def __init__(self) -> None:
        """An empty one."""
        self._cells: dict[Cell, Evaluation] = {}

    def add(self, evaluation: Evaluation) -> None:
        """Keep it if it is valid and the best of its cell."""
        if not evaluation.valid or evaluation.fitness is None:
            return
        cell = cell_of(evaluation.behaviour)
        if cell not in self._cells or order(evaluation) < order(self._cells[cell]):
            self._cells[cell] = evaluation

    def elites(self) -> list[Evaluation]:
        """The best of each cell, best first."""
        return sorted(self._cells.values(), key=order)


class EvolutionaryProposer:
    """Changes one or two parameters of a parent, or crosses two; every island in turn, parents by rank."""

    def __init__(self, islands: int = ISLANDS) -> None:
        """Start with nothing evaluated. islands: how many, at least 1."""
        self._archives = [Archive() for _ in range(islands)]
        self._counts: Counter[int] = Counter()  # evaluations of each island
        self._untried = Untried()

    def propose(self, context: Context) -> Sequence[Candidate]:
        """Children, and at first settings by chance; fewer than wanted where fewer are left."""
        rng = context.rng
        counts = self._counts.copy()
        found: list[Candidate] = []
        while len(found) < context.wanted:
            batch = [candidate.parameters for candidate in found]
            island = min(range(len(self._archives)), key=lambda n: counts[n])
            candidate = self._child(context.space, island, counts[island], rng, batch)
            if candidate is None:
                point = self._untried.draw(context.space, rng, batch)
                if point is None:
                    break
                candidate = Candidate(parameters=point)
            counts[island] += 1
            found.append(_from(island, candidate))
        return found

    def observe(self, evaluations: Sequence[Evaluation]) -> None:
        """Put each into the archive of its island."""
        self._untried.observe(evaluations)
        for evaluation in evaluations:
            number = evaluation.candidate.origin.removeprefix(_ORIGIN)
            island = int(number) % len(self._archives) if number.isdigit() else 0
            self._counts[island] += 1
            self._archives[island].add(evaluation)

    def _child(
        self, space: Space, island: int, made: int, rng: random.Random, batch: Sequence[Point]
    ) -> Candidate | None:
        """A fresh child of this island, or of the one before it where that is due; None where none was found."""
        from_island = island - 1 if made % _EVERY == _EVERY - 1 else island
        elites = self._archives[from_island].elites()
        if made < _STARTUP or not elites:
            return None
        for tried in range(_TRIES):
            parents = [_by_rank(elites, rng).candidate]
            point = dict(parents[0].parameters)
            if len(elites) > 1 and rng.random() < _CROSSED:
                parents.append(_by_rank(elites, rng).candidate)
                point = {name: rng.choice((value, parents[1].parameters[name])) for name, value in point.items()}
            else:
                for _ in range(1 + tried // _WIDER + (rng.random() < _TWICE)):
                    point = _changed(space, point, rng)
            if space.violated(point) is None and self._untried.fresh(point, batch):
                return Candidate(parameters=point, parents=tuple(p.key for p in parents))
        return None


def _by_rank(elites: Sequence[Evaluation], rng: random.Random) -> Evaluation:
    """One of them, each half as likely as the one before it."""
    return elites[min(int(-math.log2(1 - rng.random())), len(elites) - 1)]


def _changed(space: Space, point: Point, rng: random.Random) -> Point:
    """The same with another value of one parameter, as often a neighbour as any."""
    names = [name for name, p in space.parameters.items() if len(p.values) > 1]
    if not names:
        return point
    name = rng.choice(names)
    values = space.parameters[name].values
    at = values.index(point[name])
    near = [value for n, value in enumerate(values) if abs(n - at) == 1]
    return {**point, name: rng.choice(near if rng.random() < _NEAR else [v for v in values if v != point[name]])}


def _from(island: int, candidate: Candidate) -> Candidate:
    return msgspec.structs.replace(candidate, origin=f"{_ORIGIN}{island}")

"""MAP-Elites on islands: each island has an archive of the best candidate per cell (Mouret and Clune 2015).

The cell of a kernel is its busiest pipe, its shared memory and its registers. The last two limit the occupancy.
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
#: Several islands search independently; this helps only in large spaces (docs/evolve-proposers.md).
ISLANDS = 1
_ORIGIN = "island "
_STARTUP = 1  # random proposals per island
_EVERY = 8  # every 8th proposal of an island has a parent from the previous island
_TRIES, _WIDER = 16, 5  # attempts to make a new child; after each _WIDER attempts one more parameter is changed
# Probability that two elites are crossed, that a second parameter is changed, and that a value moves to a neighbour.
_CROSSED, _TWICE, _NEAR = 0.2, 0.1, 0.5
_SMEM_STEP, _REGISTER_STEP = 32 * 1024, 32


def archive_cell(behaviour: Descriptor | None) -> Cell:
    """Return the cell of a behaviour: pipe, shared memory in steps of 32 KiB, registers in steps of 32."""
    b = behaviour or Descriptor()
    return b.pipe, math.ceil(b.smem_bytes / _SMEM_STEP), math.ceil(b.registers / _REGISTER_STEP)


def sort_key(evaluation: Evaluation) -> tuple[bool, float]:
    """Return the key that sorts valid evaluations best first, measured ones before estimated ones."""
    return evaluation.fitness_kind != "seconds", math.inf if evaluation.fitness is None else evaluation.fitness


class Archive:
    """The best valid evaluation of each cell."""

    def __init__(self) -> None:
        """Create an empty archive."""
        self._cells: dict[Cell, Evaluation] = {}

    def add(self, evaluation: Evaluation) -> None:
        """Store a valid evaluation if it is the best of its cell."""
        if not evaluation.valid or evaluation.fitness is None:
            return
        cell = archive_cell(evaluation.behaviour)
        if cell not in self._cells or sort_key(evaluation) < sort_key(self._cells[cell]):
            self._cells[cell] = evaluation

    def elites(self) -> list[Evaluation]:
        """Return the best evaluation of each cell, best first."""
        return sorted(self._cells.values(), key=sort_key)


class EvolutionaryProposer:
    """Mutates one or two parameters of a parent, or crosses two parents.

    Islands take turns; parents are drawn by rank.
    """

    def __init__(self, islands: int = ISLANDS) -> None:
        """Start without evaluations. islands: their number, at least 1."""
        self._archives = [Archive() for _ in range(islands)]
        self._counts: Counter[int] = Counter()  # evaluations of each island
        self._untried = Untried()

    def propose(self, context: Context) -> Sequence[Candidate]:
        """Return children, at first random settings. Returns fewer than wanted if fewer are left."""
        rng = context.rng
        counts = self._counts.copy()
        candidates: list[Candidate] = []
        while len(candidates) < context.wanted:
            batch = [candidate.parameters for candidate in candidates]
            island = min(range(len(self._archives)), key=lambda n: counts[n])
            candidate = self._child(context.space, island, counts[island], rng, batch)
            if candidate is None:
                point = self._untried.draw(context.space, rng, batch)
                if point is None:
                    break
                candidate = Candidate(parameters=point)
            counts[island] += 1
            candidates.append(_mark_island(island, candidate))
        return candidates

    def observe(self, evaluations: Sequence[Evaluation]) -> None:
        """Add each evaluation to the archive of its island."""
        self._untried.observe(evaluations)
        for evaluation in evaluations:
            number = evaluation.candidate.origin.removeprefix(_ORIGIN)
            island = int(number) % len(self._archives) if number.isdigit() else 0
            self._counts[island] += 1
            self._archives[island].add(evaluation)

    def _child(
        self, space: Space, island: int, made: int, rng: random.Random, batch: Sequence[Point]
    ) -> Candidate | None:
        """Make a new child of this island or, every _EVERY proposals, of the previous one. None if no child is new."""
        from_island = island - 1 if made % _EVERY == _EVERY - 1 else island
        elites = self._archives[from_island].elites()
        if made < _STARTUP or not elites:
            return None
        for tried in range(_TRIES):
            parents = [_draw_by_rank(elites, rng).candidate]
            point = dict(parents[0].parameters)
            if len(elites) > 1 and rng.random() < _CROSSED:
                parents.append(_draw_by_rank(elites, rng).candidate)
                point = {name: rng.choice((value, parents[1].parameters[name])) for name, value in point.items()}
            else:
                for _ in range(1 + tried // _WIDER + (rng.random() < _TWICE)):
                    point = _mutate(space, point, rng)
            if space.violated(point) is None and self._untried.fresh(point, batch):
                return Candidate(parameters=point, parents=tuple(p.key for p in parents))
        return None


def _draw_by_rank(elites: Sequence[Evaluation], rng: random.Random) -> Evaluation:
    """Draw an elite; each is half as likely as the previous one."""
    return elites[min(int(-math.log2(1 - rng.random())), len(elites) - 1)]


def _mutate(space: Space, point: Point, rng: random.Random) -> Point:
    """Change one parameter, in half of the cases to a neighbouring value."""
    names = [name for name, p in space.parameters.items() if len(p.values) > 1]
    if not names:
        return point
    name = rng.choice(names)
    values = space.parameters[name].values
    index = values.index(point[name])
    neighbours = [value for n, value in enumerate(values) if abs(n - index) == 1]
    return {**point, name: rng.choice(neighbours if rng.random() < _NEAR else [v for v in values if v != point[name]])}


def _mark_island(island: int, candidate: Candidate) -> Candidate:
    return msgspec.structs.replace(candidate, origin=f"{_ORIGIN}{island}")

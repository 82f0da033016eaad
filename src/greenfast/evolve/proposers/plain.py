"""Proposers that learn nothing: by chance, all in order, and a list from a file."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from pathlib import Path

from greenfast.evolve.jsonl import read_lines
from greenfast.evolve.proposal import Candidate, Context, Evaluation
from greenfast.evolve.proposers.untried import Point, Untried


class RandomProposer:
    """Settings evenly drawn from those that the constraints allow, none twice."""

    def __init__(self) -> None:
        """Start with nothing evaluated."""
        self._untried = Untried()

    def propose(self, context: Context) -> Sequence[Candidate]:
        """Draw; fewer than wanted where fewer are left."""
        rng = context.rng
        batch: list[Point] = []
        while len(batch) < context.wanted and (point := self._untried.draw(context.space, rng, batch)) is not None:
            batch.append(point)
        return [Candidate(parameters=point) for point in batch]

    def observe(self, evaluations: Sequence[Evaluation]) -> None:
        """Remember what was evaluated."""
        self._untried.observe(evaluations)


class ExhaustiveProposer:
    """Every setting that the constraints allow, in the space's order."""

    def __init__(self) -> None:
        """Start with nothing evaluated."""
        self._untried = Untried()

    def propose(self, context: Context) -> Sequence[Candidate]:
        """The next ones of the list."""
        left = (point for point in context.space.listed() if self._untried.fresh(point))
        return [Candidate(parameters=point) for point in islice(left, context.wanted)]

    def observe(self, evaluations: Sequence[Evaluation]) -> None:
        """Remember what was evaluated."""
        self._untried.observe(evaluations)


class ScriptedProposer:
    """The candidates of a file in its order, one as JSON on each line: parameters, edits, rationale, prediction."""

    def __init__(self, file: str) -> None:
        """Read the file. Raises UsageError that names the line where one holds no candidate."""
        self._left = list(read_lines(Path(file), Candidate, "candidate"))

    def propose(self, context: Context) -> Sequence[Candidate]:
        """The next ones."""
        return self._left[: context.wanted]

    def observe(self, evaluations: Sequence[Evaluation]) -> None:
        """What came does not matter, only how many did."""
        self._left = self._left[len(evaluations) :]

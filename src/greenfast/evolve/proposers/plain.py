"""Proposers that do not learn: random settings, all settings in order, and a list from a file."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from pathlib import Path

from greenfast.evolve.jsonl import read_lines
from greenfast.evolve.proposal import Candidate, Context, Evaluation
from greenfast.evolve.proposers.untried import Point, Untried


class RandomProposer:
    """Draws allowed settings uniformly, without repetition."""

    def __init__(self) -> None:
        """Start with nothing evaluated."""
        self._untried = Untried()

    def propose(self, context: Context) -> Sequence[Candidate]:
        """Draw settings; fewer than wanted if fewer are left."""
        rng = context.rng
        batch: list[Point] = []
        while len(batch) < context.wanted and (point := self._untried.draw(context.space, rng, batch)) is not None:
            batch.append(point)
        return [Candidate(parameters=point) for point in batch]

    def observe(self, evaluations: Sequence[Evaluation]) -> None:
        """Remember what was evaluated."""
        self._untried.observe(evaluations)


class ExhaustiveProposer:
    """Proposes every allowed setting, in the space's order."""

    def __init__(self) -> None:
        """Start with nothing evaluated."""
        self._untried = Untried()

    def propose(self, context: Context) -> Sequence[Candidate]:
        """Return the next settings."""
        points = (point for point in context.space.listed() if self._untried.fresh(point))
        return [Candidate(parameters=point) for point in islice(points, context.wanted)]

    def observe(self, evaluations: Sequence[Evaluation]) -> None:
        """Remember what was evaluated."""
        self._untried.observe(evaluations)


class ScriptedProposer:
    """Proposes the candidates of a file in order, one JSON object per line."""

    def __init__(self, file: str) -> None:
        """Read the file. Raises UsageError with the number of an invalid line."""
        self._left = list(read_lines(Path(file), Candidate, "candidate"))

    def propose(self, context: Context) -> Sequence[Candidate]:
        """Return the next candidates."""
        return self._left[: context.wanted]

    def observe(self, evaluations: Sequence[Evaluation]) -> None:
        """Skip the evaluated candidates; their results are not used."""
        self._left = self._left[len(evaluations) :]

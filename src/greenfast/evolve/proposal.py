"""What passes between the loop and a proposer: candidates one way, their evaluations the other.

``greenfast.evolve.proposers.make_proposer(name, options)`` makes a proposer by its name on the command line; options
are texts, such as {"islands": "4", "model": "replay:answers"}.

A proposer keeps no state that ``observe`` does not give it, and takes all its chance from ``Context.rng``: a run that
is resumed makes a new proposer, hands it every past batch of evaluations in order, and goes on with ``propose``.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from typing import Literal, Protocol

import msgspec

from greenfast.evolve.space import Space, Value
from greenfast.spec.errors import MachineError

#: Where an evaluation can end, in order. ``space``: it is not in the space; ``duplicate``: the same machine code and
#: launches as an earlier candidate's, whose fitness it is given; then the judge's gates, the screen by counts, the race
#: on the GPU and the whole validation.
Stage = Literal["space", "duplicate", "BUILD", "RESOURCES", "CORRECTNESS", "screen", "race", "validate"]
#: ``seconds`` are measured on a GPU; an ``estimate`` is from counts and is no speed; ``""``: there is no fitness.
FitnessKind = Literal["seconds", "estimate", ""]


class ProposerError(MachineError):
    """A proposer could not answer now: an endpoint that is down, an answer without a candidate. The run can resume."""


class Edit(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The new text of one of the space's named regions of source."""

    region: str
    text: str


class Candidate(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is proposed.

    parameters: those that differ from their defaults at least; the rest is filled in. rationale: why. prediction: what
    it should change, and by how much. parents: keys of the candidates that it was made from. origin: what of the
    proposer made it, such as an island; for the proposer's own use.
    """

    parameters: dict[str, Value]
    edits: tuple[Edit, ...] = ()
    rationale: str = ""
    prediction: str = ""
    parents: tuple[str, ...] = ()
    origin: str = ""

    @property
    def key(self) -> str:
        """Names what is asked for, parameters and edits alone: 16 hexadecimal digits."""
        content = [sorted(self.parameters.items()), sorted((e.region, e.text) for e in self.edits)]
        return hashlib.sha256(msgspec.json.encode(content)).hexdigest()[:16]


class Descriptor(msgspec.Struct, frozen=True, kw_only=True):
    """How a kernel behaves; an archive's cells are made of it.

    pipe: the one that the counts say is busiest; empty where nothing was counted. smem_bytes: static and dynamic, of a
    block. registers: of a thread.
    """

    pipe: str = ""
    smem_bytes: int = 0
    registers: int = 0


class Evaluation(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a candidate.

    hash: of its machine code and launches; empty where it was not built. stage: where it ended; valid: whether nothing
    was found wrong with it. fitness: lower is better, in seconds or as ``fitness_kind`` says; None where it has none.
    behaviour: None where it was not built. feedback: for the proposer, why it ended there. cost_seconds: of the
    machine. gpu_seconds: of it, on a GPU.
    """

    candidate: Candidate
    hash: str = ""
    stage: Stage
    valid: bool
    fitness: float | None = None
    fitness_kind: FitnessKind = ""
    behaviour: Descriptor | None = None
    feedback: str = ""
    cost_seconds: float = 0.0
    gpu_seconds: float = 0.0


class Insight(msgspec.Struct, frozen=True, kw_only=True):
    """What a change did: what was predicted, what came. Only one with a record's hash was measured."""

    change: str
    prediction: str
    outcome: str
    record: str = ""


class Context(msgspec.Struct, frozen=True, kw_only=True):
    """What a proposer is told.

    task: what is to be computed, and on what, in words. baseline: what has to be beaten. history: all that were
    evaluated, oldest first. archive: the best of each cell, best first. wanted: how many candidates;
    more are cut off. seed: of this batch. evaluations_left, gpu_seconds_left: of the budget; None for no limit.
    """

    space: Space
    task: str
    wanted: int
    seed: int
    baseline: Evaluation | None = None
    history: tuple[Evaluation, ...] = ()
    archive: tuple[Evaluation, ...] = ()
    insights: tuple[Insight, ...] = ()
    evaluations_left: int | None = None
    gpu_seconds_left: float | None = None

    @property
    def rng(self) -> random.Random:
        """A new generator of chance, always the same for the same batch."""
        return random.Random(self.seed)

    @property
    def best(self) -> Evaluation | None:
        """The valid evaluation with the least fitness of the best kind that there is, or None."""
        return select_best(self.history)


class Proposer(Protocol):
    """Whoever proposes candidates."""

    def propose(self, context: Context) -> Sequence[Candidate]:
        """Candidates to evaluate next; none where there is nothing left to propose, which ends the run.

        Raises ProposerError where it cannot answer now.
        """

    def observe(self, evaluations: Sequence[Evaluation]) -> None:
        """What became of one batch, in the order of the proposal; also called for past ones when a run is resumed."""


def select_best(evaluations: Sequence[Evaluation]) -> Evaluation | None:
    """The valid one with the least fitness, measured ones before estimated ones; None where none has a fitness."""
    found = [e for e in evaluations if e.valid and e.fitness is not None]
    measured = [e for e in found if e.fitness_kind == "seconds"]
    return min(measured or found, key=lambda e: e.fitness or 0.0, default=None)

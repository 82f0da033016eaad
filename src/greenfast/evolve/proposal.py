"""The data between the search loop and a proposer: candidates and their evaluations.

``greenfast.evolve.proposers.make_proposer(name, options)`` makes a proposer by its name on the command line; options
are texts, such as {"islands": "4"}.

A proposer's state depends only on the evaluations passed to ``observe``, and its random numbers come from
``Context.rng``. A resumed run makes a new proposer, passes it all past batches in order, and continues with
``propose``.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal, Protocol, TypeVar

import msgspec

from greenfast.evolve.space import Space, Value
from greenfast.judge.store import decode
from greenfast.spec.errors import MachineError, UsageError
from greenfast.spec.files import read_file

T = TypeVar("T")

#: The stages at which an evaluation can end, in order. ``space``: not in the space. ``duplicate``: same machine code
#: and launches as an earlier candidate; its fitness is copied. Then the judge's gates, the screen by counts, the timing
#: on the GPU (``race``) and the validation of the finalists.
Stage = Literal["space", "duplicate", "BUILD", "RESOURCES", "CORRECTNESS", "screen", "race", "validate"]
#: ``seconds``: measured on a GPU. ``estimate``: computed from counts, not a speed. ``""``: no fitness.
FitnessKind = Literal["seconds", "estimate", ""]
_SMEM_STEP, _REGISTER_STEP = 32 * 1024, 32
#: Largest file of lines: a device or a pipe may never end.
_MAX_BYTES = 64 << 20


class ProposerError(MachineError):
    """A proposer has no answer now: its endpoint is down, or the answer has no candidate. The run can be resumed."""


class Edit(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The new text of a named source region of the space."""

    region: str
    text: str


class Candidate(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A proposal.

    parameters: at least the ones with other values than the default. rationale: the reason. prediction: the expected
    change and its size. parents: keys of its source candidates. origin: for the proposer's own use, such as an
    island.
    """

    parameters: dict[str, Value]
    edits: tuple[Edit, ...] = ()
    rationale: str = ""
    prediction: str = ""
    parents: tuple[str, ...] = ()
    origin: str = ""

    @property
    def key(self) -> str:
        """16 hexadecimal digits over the parameters and edits."""
        content = [sorted(self.parameters.items()), sorted((e.region, e.text) for e in self.edits)]
        return hashlib.sha256(msgspec.json.encode(content)).hexdigest()[:16]


def describe(space: Space, candidate: Candidate) -> str:
    """Describe a candidate by its differences from the defaults and its edits."""
    edits = ", ".join(f"edit of {edit.region}" for edit in candidate.edits)
    return ", ".join(filter(None, (space.shown(candidate.parameters), edits))) or candidate.key


class Descriptor(msgspec.Struct, frozen=True, kw_only=True):
    """The descriptor of a kernel's behaviour; it selects the cell of the archive.

    pipe: the busiest pipe by the counts; empty without counts. smem_bytes: static and dynamic, per block. registers:
    per thread.
    """

    pipe: str = ""
    smem_bytes: int = 0
    registers: int = 0

    @property
    def cell(self) -> tuple[str, int, int]:
        """The cell: pipe, shared memory in steps of 32 KiB, registers in steps of 32; both limit the occupancy."""
        return self.pipe, math.ceil(self.smem_bytes / _SMEM_STEP), math.ceil(self.registers / _REGISTER_STEP)


class Evaluation(msgspec.Struct, frozen=True, kw_only=True):
    """The result of evaluating a candidate.

    hash: of its machine code and launches; empty if it was not built. stage: the stage at which it ended. valid:
    whether it passed all stages so far. fitness: lower is better; see ``fitness_kind``; None without a time or
    estimate. behaviour: None if it was not built. feedback: the reason of its end, for the proposer. cost_seconds:
    seconds of the machine. gpu_seconds: the part on a GPU.
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
    """A change with its predicted and actual outcome.

    record: digest of the measurement; empty if it was not measured.
    """

    change: str
    prediction: str
    outcome: str
    record: str = ""


class Context(msgspec.Struct, frozen=True, kw_only=True):
    """The input of a proposer.

    task: the computation and the target in words. baseline: the evaluation to beat. history: all evaluations, oldest
    first. archive: the best of each cell, best first. wanted: number of candidates; more are ignored. seed: of this
    batch.
    """

    space: Space
    task: str
    wanted: int
    seed: int
    baseline: Evaluation | None = None
    history: tuple[Evaluation, ...] = ()
    archive: tuple[Evaluation, ...] = ()
    insights: tuple[Insight, ...] = ()

    @property
    def rng(self) -> random.Random:
        """A new random generator, equal for equal batches."""
        return random.Random(self.seed)

    @property
    def best(self) -> Evaluation | None:
        """The best valid evaluation (see ``select_best``), or None."""
        return select_best(self.history)


class Proposer(Protocol):
    """The interface of a proposer."""

    def propose(self, context: Context) -> Sequence[Candidate]:
        """Return the next candidates. An empty sequence ends the run. Raises ProposerError if it has no answer now."""

    def observe(self, evaluations: Sequence[Evaluation]) -> None:
        """Receive the evaluations of one batch, in the order of the proposal; also past batches of a resumed run."""


def select_best(evaluations: Sequence[Evaluation]) -> Evaluation | None:
    """Return the valid evaluation with the lowest measured time, else with the lowest estimate, else None."""
    with_fitness = [e for e in evaluations if e.valid and e.fitness is not None]
    measured = [e for e in with_fitness if e.fitness_kind == "seconds"]
    return min(measured or with_fitness, key=lambda e: e.fitness or 0.0, default=None)


def build_archive(history: Iterable[Evaluation]) -> tuple[Evaluation, ...]:
    """Return the best valid evaluation of each cell, best first; measured ones are before estimated ones."""

    def sort_key(e: Evaluation) -> tuple[bool, float]:
        return e.fitness_kind != "seconds", math.inf if e.fitness is None else e.fitness

    best: dict[tuple[str, int, int], Evaluation] = {}
    for e in history:
        cell = (e.behaviour or Descriptor()).cell
        if e.valid and e.fitness is not None and (cell not in best or sort_key(e) < sort_key(best[cell])):
            best[cell] = e
    return tuple(sorted(best.values(), key=sort_key))


def read_lines(path: Path, kind: type[T], name: str) -> tuple[T, ...]:
    """Return the values of a file; empty lines are skipped.

    name: the noun for a line's value in messages. Raises UsageError with the file, the line and the fault.
    """
    try:
        data = read_file(path, _MAX_BYTES)
    except OSError as e:
        raise UsageError(
            f"{path}: cannot be read ({e.strerror}); allowed is a file of lines, each a {name} as JSON"
        ) from e
    lines = data.splitlines()
    values = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            values.append(decode(line, kind))
        except msgspec.DecodeError as e:
            raise UsageError(f"{path}, line {number}: no {name}: {e}") from e
    return tuple(values)

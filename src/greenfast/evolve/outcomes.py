"""What stages found, put together: of one kernel, of equal ones, and as an insight."""

from __future__ import annotations

import msgspec

from greenfast.evolve.proposal import Candidate, Evaluation, Insight
from greenfast.evolve.space import Space
from greenfast.evolve.stages import StageResult


def joined(built: StageResult, later: StageResult) -> StageResult:
    """What two stages found of one kernel."""
    behaviour = built.behaviour
    if behaviour is not None and later.behaviour is not None:
        behaviour = msgspec.structs.replace(behaviour, pipe=later.behaviour.pipe)
    return msgspec.structs.replace(later, hash=built.hash, behaviour=behaviour)


def duplicate(e: Evaluation, first: Evaluation | None) -> Evaluation:
    """The same machine code and launches as another's, whose fitness it is given."""
    if first is None:
        return e
    other = first.candidate.key if first.candidate.parameters or first.candidate.edits else "the baseline"
    return _given(e, first, f"the same machine code and launches as {other}")


def repeated(candidate: Candidate, first: Evaluation) -> Evaluation:
    """Of a candidate with the parameters and edits of an earlier one: nothing is done for it."""
    return _given(Evaluation(candidate=candidate, stage="duplicate", valid=first.valid), first, "proposed before")


def _given(e: Evaluation, first: Evaluation, why: str) -> Evaluation:
    return msgspec.structs.replace(
        e,
        hash=first.hash,
        stage="duplicate",
        valid=first.valid,
        fitness=first.fitness,
        fitness_kind=first.fitness_kind,
        behaviour=first.behaviour,
        feedback=why,
    )


def insight_of(space: Space, e: Evaluation, record: str) -> Insight:
    """What a race showed of a candidate. record: the digest of the event that says so."""
    c = e.candidate
    settings = space.shown(c.parameters)
    edits = ", ".join(f"edit of {edit.region}" for edit in c.edits)
    change = "; ".join(filter(None, (c.rationale, settings, edits)))
    return Insight(change=change, prediction=c.prediction, outcome=e.feedback, record=record)


def without_costs(e: Evaluation) -> Evaluation:
    """What is logged of it: times differ when a run is repeated."""
    return msgspec.structs.replace(e, cost_seconds=0.0, gpu_seconds=0.0)

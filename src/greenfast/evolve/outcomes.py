"""Combine stage results: of one kernel, of duplicates, and as an insight."""

from __future__ import annotations

import msgspec

from greenfast.evolve.proposal import Candidate, Evaluation, Insight
from greenfast.evolve.space import Space
from greenfast.evolve.stages import StageResult


def merge_results(built: StageResult, later: StageResult) -> StageResult:
    """Merge the results of two stages of one kernel."""
    behaviour = built.behaviour
    if behaviour is not None and later.behaviour is not None:
        behaviour = msgspec.structs.replace(behaviour, pipe=later.behaviour.pipe)
    return msgspec.structs.replace(later, hash=built.hash, behaviour=behaviour)


def mark_duplicate(e: Evaluation, first: Evaluation | None) -> Evaluation:
    """Mark an evaluation as a duplicate: same machine code and launches as ``first``; copy that fitness."""
    if first is None:
        return e
    other = first.candidate.key if first.candidate.parameters or first.candidate.edits else "the baseline"
    return _copy_result(e, first, f"the same machine code and launches as {other}")


def mark_repeated(candidate: Candidate, first: Evaluation) -> Evaluation:
    """Make the evaluation of a candidate with the parameters and edits of an earlier one, without building it."""
    return _copy_result(Evaluation(candidate=candidate, stage="duplicate", valid=first.valid), first, "proposed before")


def _copy_result(e: Evaluation, first: Evaluation, why: str) -> Evaluation:
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


def make_insight(space: Space, e: Evaluation, record: str) -> Insight:
    """Make the insight of a timed candidate. record: digest of the log event with the timing."""
    c = e.candidate
    settings = space.shown(c.parameters)
    edits = ", ".join(f"edit of {edit.region}" for edit in c.edits)
    change = "; ".join(filter(None, (c.rationale, settings, edits)))
    return Insight(change=change, prediction=c.prediction, outcome=e.feedback, record=record)


def without_costs(e: Evaluation) -> Evaluation:
    """Return the evaluation without costs, for the log: times differ between repeated runs."""
    return msgspec.structs.replace(e, cost_seconds=0.0, gpu_seconds=0.0)

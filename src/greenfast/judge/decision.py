"""The decision of a run from its gates. It is recomputed whenever a record is read."""

from __future__ import annotations

from collections.abc import Sequence

from greenfast.judge.check_plan import NOTHING_DRAWN
from greenfast.judge.record_schema import CachedTiming, Decision, GateResult, PlanCoverage
from greenfast.judge.report.speedups import describe_source


def decide(
    gates: Sequence[GateResult], quoted: CachedTiming | None = None, exam: PlanCoverage | None = None
) -> tuple[Decision, list[str]]:
    """Decide from the gates and the check plan, and return the decision with its reasons.

    DEFER: a gate failed. PENDING: a gate is pending. UNCHECKED: all gates passed, but a check was skipped.
    PARTIAL: all gates passed on a part of the plan. MERGE: all gates passed on the full plan with every check.
    """
    missing = exam.missing if exam is not None else []
    is_completed = quoted is not None and exam is not None and exam.complete and bool(missing)
    decision, reasons = _decide(gates, [] if is_completed else missing)
    if exam is not None and exam.seed is not None and not exam.drawn and NOTHING_DRAWN not in missing:
        reasons.append("no shapes were drawn: the task declares no ranges of them")
    if quoted is not None and is_completed:
        reasons.append(f"the rest of the exam held in the record {describe_source(quoted)}")
    if quoted is not None:
        reasons.append(f"PERFORMANCE {describe_source(quoted)}: not measured in this run")
    return decision, reasons


def _decide(gates: Sequence[GateResult], missing: Sequence[str]) -> tuple[Decision, list[str]]:
    failed = [r for r in gates if r.status == "FAIL"]
    if failed:
        return "DEFER", [f"{r.gate}: {reason}" for r in failed for reason in (r.reasons or [r.summary])]
    waiting = [r for r in gates if r.status == "PENDING"]
    if waiting:
        return "PENDING", [f"{r.gate}: {reason}" for r in waiting for reason in (r.reasons or [r.summary])]
    unchecked = [f"{r.gate}: {check}" for r in gates for check in r.unchecked]
    if unchecked:
        return "UNCHECKED", [*unchecked, *(f"partial: {part}" for part in missing)]
    if missing:
        return "PARTIAL", [f"partial: {', '.join(missing)}; {_describe_all(gates)} hold on those"]
    return "MERGE", [f"{_describe_all(gates)} hold"]


def _describe_all(gates: Sequence[GateResult]) -> str:
    return f"all {'five' if len(gates) == 5 else len(gates)} gates"

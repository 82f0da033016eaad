"""What the gates come to; a record says it, and whoever reads the record draws it again."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from greenfast.judge.gates.performance import judge
from greenfast.judge.record import Decision, GateResult, Quote
from greenfast.judge.report.speedups import quoted_from


def decide(gates: Sequence[GateResult], quoted: Quote | None = None) -> tuple[Decision, list[str]]:
    """MERGE where all gates pass, DEFER where one fails, else PENDING; with the reasons."""
    decision, reasons = _decide(gates)
    if quoted is not None:
        floor = "" if quoted.floor_recomputed else "; its noise floor is as stored, not recomputed from blocks"
        reasons.append(f"PERFORMANCE {quoted_from(quoted)}: not measured in this run{floor}")
    return decision, reasons


def _decide(gates: Sequence[GateResult]) -> tuple[Decision, list[str]]:
    failed = [r for r in gates if r.status == "FAIL"]
    if failed:
        return "DEFER", [f"{r.gate}: {reason}" for r in failed for reason in (r.reasons or [r.summary])]
    waiting = [r for r in gates if r.status == "PENDING"]
    if waiting:
        return "PENDING", [f"{r.gate}: {reason}" for r in waiting for reason in (r.reasons or [r.summary])]
    return "MERGE", ["all five gates hold"]


def quoted_performance(quoted: Quote, required: float | None) -> GateResult:
    """PERFORMANCE from quoted speedups; each line says so."""
    result = judge(quoted.speedups, required)
    source = quoted_from(quoted)
    return msgspec.structs.replace(
        result,
        summary=f"{source}, not measured here: {result.summary}",
        reasons=[f"{reason} ({source})" for reason in result.reasons],
        checks=[(f"{what}, quoted", *rest) for what, *rest in result.checks],
    )

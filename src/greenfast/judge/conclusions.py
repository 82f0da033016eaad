"""The conclusions of a record: they follow from its measurements, and are computed whenever it is read.

- Block medians give each speedup with its interval, noise floor and verdict.
- The numbers and limits of each correctness row give its gates.
- Rows, speedups and builds give the results of the gates (``Gate.conclude``).
- The gates and the check plan give the decision with its reasons.

A file of version 2, and the record that ``greenfast judge --json`` prints, hold conclusions too. These must be the
computed ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import msgspec

from greenfast.judge.check_plan import NOTHING_DRAWN
from greenfast.judge.gates.correctness import judge_row
from greenfast.judge.gates.performance import compute_speedups, judge_again
from greenfast.judge.gates.registry import GATES
from greenfast.judge.pipeline import conclude_checks, pending
from greenfast.judge.record_schema import (
    FIRST_GATES,
    CachedTiming,
    CorrectnessRow,
    Decision,
    GateResult,
    Limits,
    PlanCoverage,
    Record,
    Run,
    Side,
)
from greenfast.judge.report.facts import describe_source

#: Tolerance between a stored and a computed figure: the last digit may differ between processors.
_LAST_DIGIT = 1.1e-4
_Run = TypeVar("_Run", bound=Run)


class Mismatch(NamedTuple):
    """A field of a record's file, its stored value, and the value that follows from the measurements."""

    field: str
    stored: Any
    computed: Any


def conclude(record: _Run) -> _Run:
    """Return a record with the conclusions that follow from its measurements.

    Raises ValueError if timings are not paired, or belong to an implementation that is not correct.
    """
    replace = msgspec.structs.replace
    sides = {name: getattr(record, name, None) for name in ("baseline", "candidate", "side")}
    record = replace(record, **{name: _judge_rows(side) for name, side in sides.items() if side is not None})
    if isinstance(record, Record):
        record = replace(record, **_conclude_speedups(record), gates=_list_results(record))
    gates = [
        GATES[result.gate].conclude(record, result) if result.gate in GATES else conclude_checks(result)
        for result in record.gates
    ]
    record = replace(record, gates=gates)
    if isinstance(record, Record):
        exam = _conclude_coverage(record)
        decision, reasons = decide(gates, record.quoted, exam)
        record = replace(record, exam=exam, decision=decision, reasons=reasons)
    return record


def _conclude_speedups(record: Record) -> dict[str, Any]:
    """Return the speedups, and the cached ones with the verdicts that follow from their figures."""
    speedups, quoted = compute_speedups(record), record.quoted
    if find_mismatch(msgspec.to_builtins(record.speedups), msgspec.to_builtins(speedups)) is None:
        speedups = record.speedups  # They differ in the last digit at most.
    if quoted is not None:
        rows = [judge_again(row, row.required, row.gated) for row in quoted.speedups]
        quoted = msgspec.structs.replace(quoted, speedups=rows)
    return {"speedups": speedups, "quoted": quoted}


def _list_results(record: Record) -> list[GateResult]:
    """Return the first result of each gate. A gate that every record must list is PENDING if it has none."""
    results: dict[str, GateResult] = {}
    for result in record.gates:
        results.setdefault(result.gate, result)
    for name in FIRST_GATES:
        results.setdefault(name, pending(name, "the record has no result of it"))
    return list(results.values())


def _judge_rows(side: Side) -> Side:
    def judge(row: CorrectnessRow, limits: Limits | None) -> CorrectnessRow:
        return row if limits is None else msgspec.structs.replace(row, gates=judge_row(row, limits))

    rows = [judge(row, side.limits.get(row.shape)) for row in side.correctness]
    return msgspec.structs.replace(side, correctness=rows)


def _conclude_coverage(record: Record) -> PlanCoverage:
    """Return the coverage of the check plan, without the parts that no row of the candidate has.

    The task's shapes at the time of the run are unknown.
    """
    exam = record.exam or PlanCoverage(seed=None, complete=False, missing=["a check plan"])
    missing, rows = list(exam.missing), record.candidate.correctness
    if record.gate_status("CORRECTNESS") == "PASS":
        if exam.seed is not None and not any(row.drawn and row.seed == exam.seed for row in rows):
            missing.append(f"the cases of seed {exam.seed}")
        dims = {row.shape: row.dims for row in rows if row.drawn and row.seed == (exam.seed or 0)}
        missing += [name for name, sizes in exam.drawn.items() if dims.get(name) != sizes]
    if exam.seed is None and not missing and record.quoted is None:
        missing.append(NOTHING_DRAWN)
    complete = not missing or (exam.complete and record.quoted is not None)
    return msgspec.structs.replace(exam, complete=complete, missing=missing)


def find_mismatch(stored: Any, computed: Any, field: str = "") -> Mismatch | None:
    """Return the first value of plain data that differs from the computed one. Fields that one lacks are left out."""
    if isinstance(stored, Mapping) and isinstance(computed, Mapping):
        prefix = f"{field}." if field else ""
        pairs = [(stored[key], computed[key], prefix + key) for key in stored if key in computed]
    elif isinstance(stored, list) and isinstance(computed, list) and len(stored) == len(computed):
        names = [f"[{i}]" + (f" ({name})" if (name := _name_row(row)) else "") for i, row in enumerate(computed)]
        pairs = [(one, other, field + name) for one, other, name in zip(stored, computed, names, strict=True)]
    elif isinstance(stored, float) and isinstance(computed, float):
        return None if abs(stored - computed) <= _LAST_DIGIT else Mismatch(field, stored, computed)
    elif stored == computed:
        return None
    else:
        shown = [[_name_row(row) or row for row in one] if isinstance(one, list) else one for one in (stored, computed)]
        return Mismatch(field, *shown)
    return next(filter(None, (find_mismatch(*pair) for pair in pairs)), None)


def _name_row(row: Any) -> str:
    return str(row.get("gate") or row.get("shape") or "") if isinstance(row, Mapping) else ""


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

"""Validation: run the candidate and the baseline through the gates, decide, and write the artifacts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from greenfast.judge.cached_timing import reuse_cached_timing
from greenfast.judge.gates.performance import find_claim
from greenfast.judge.gates.registry import GATES
from greenfast.judge.implementation import BASELINE, CANDIDATE, BuiltSide, Implementation
from greenfast.judge.pipeline import GateRun
from greenfast.judge.profiling import profile_candidate
from greenfast.judge.record_io import PLOT, RECORD, REPORT, StoredRecord, decide, sealed_json, side_files
from greenfast.judge.record_schema import CorrectnessRow, PlanCoverage, Record
from greenfast.judge.report.compare import compare_markdown, compare_timings
from greenfast.judge.report.markdown import report
from greenfast.judge.report.plots import save_plot
from greenfast.judge.request import ProgressListener, Request
from greenfast.judge.store import check_writable, new_run_folder, to_json, write_files, write_whole
from greenfast.judge.timing.estimators import AGAIN
from greenfast.spec.problem import NORMAL

COMPARISON = "COMPARE.md"
#: The folder of a run with a solution's sources.
SOURCES = "solution"


@dataclass(frozen=True)
class Outcome:
    """A record, the folder of its artifacts, and the compiled implementations."""

    record: Record
    folder: Path
    built: Sequence[BuiltSide] = ()


def validate(
    request: Request,
    baseline: Implementation,
    candidate: Implementation,
    observer: ProgressListener,
    *,
    required: float | None = None,
    profile: bool = True,
    kept: Sequence[StoredRecord] = (),
) -> Outcome:
    """Run the gates in order, decide, and write the artifacts.

    required: the required speedup; overrides the one of the candidate's rung.
    profile: True to take a Nsight Compute profile in EVIDENCE, if ncu and a GPU are available.
    kept: records with cached timings for PERFORMANCE, used if this machine cannot time.
    Raises MachineError for an unwritable folder, before any gate runs.
    """
    check_writable(request.results)
    run = GateRun(
        request,
        {BASELINE: baseline, CANDIDATE: candidate},
        observer,
        required=required,
        profile=profile_candidate if profile else None,
        reuse_timing=lambda run, reason: reuse_cached_timing(run, kept, reason),
    )
    run.run(GATES.values())
    exam = _exam(run)
    decision, reasons = decide(run.gates, run.quoted, exam)
    fields = run.facts() | {role: run.side(role) for role in run.implementations}
    record = Record(
        **fields,
        clocks=run.timed.clocks,
        order_seed=run.timed.order_seed,
        parity=run.correctness.parity,
        speedups=run.timed.speedups,
        claim=find_claim(run.timed.speedups),
        baseline_again=run.timed.rows.get(AGAIN, []),
        decision=decision,
        reasons=reasons,
        exam=exam,
        quoted=run.quoted,
    )
    with new_run_folder(request.results, run.stamp) as (work, publish):
        _write(record, work, run)
        folder = publish()
    if record.speedups:
        required = record.speedups[0].required or None
        comparisons = compare_timings(record.baseline.timing, record.candidate.timing, required=required)
        write_whole(request.out / COMPARISON, compare_markdown(comparisons))
    else:  # Remove the comparison of an older run, so that it is not taken for this run's.
        (request.out / COMPARISON).unlink(missing_ok=True)
    return Outcome(record, folder, run.sides)


def _exam(run: GateRun) -> PlanCoverage:
    plan = run.request.check_plan
    if plan is None:
        return PlanCoverage(seed=None, complete=False, missing=["some of the task's cases"])
    random_shapes = {shape.name: dict(shape.dims) for shape in plan.random_shapes}
    missing = [*plan.missing, *_report_constant_inputs(run.correctness.rows.get(CANDIDATE, []))]
    return PlanCoverage(
        seed=plan.seed, drawn=random_shapes, complete=run.quote_completes or not missing, missing=missing
    )


def _report_constant_inputs(rows: Sequence[CorrectnessRow]) -> list[str]:
    """Report the shapes with equal inputs for all seeds: a kernel could hold precomputed answers."""
    digests: dict[str, list[str]] = {}
    for row in rows:
        if row.variant == NORMAL:
            digests.setdefault(row.shape, []).append(row.inputs_digest)
    constant = [shape for shape, values in digests.items() if len(values) > 1 and len(set(values)) == 1]
    return [f"inputs that depend on the seed ({', '.join(constant)})"] if constant else []


def _write(record: Record, work: Path, run: GateRun) -> None:
    """Write a record, its report and plot, and each implementation's files, a solution's sources included."""
    plot = PLOT if record.speedups else None
    if plot:
        save_plot(record, work / plot)
    write_whole(work / RECORD, sealed_json(record))
    write_whole(work / REPORT, report(record, plot=plot))
    for folder, role, side in ((work, CANDIDATE, record.candidate), (work / BASELINE, BASELINE, record.baseline)):
        write_files(folder, {name: to_json(content) for name, content in side_files(record, side).items()})
        write_files(folder / SOURCES, run.implementations[role].files)

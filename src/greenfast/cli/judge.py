"""``greenfast judge``."""

from __future__ import annotations

import argparse
from pathlib import Path

from greenfast.cli.ci import write_ci_outputs, write_verdict
from greenfast.cli.console import OPEN, UNCHECKED, required_gates
from greenfast.cli.page import check_page
from greenfast.cli.request import request_of
from greenfast.cli.validate import arch_from_cached_record, judged, load_kept_records, show_outcome
from greenfast.judge.baseline import load_baseline, load_solution
from greenfast.judge.formats.importers import check_traces, import_problem, import_solution, write_traces
from greenfast.judge.record_schema import GATES, Record
from greenfast.judge.request import add_check_plan, is_partial
from greenfast.judge.solution.schema import ResolvedSolution, find_solution
from greenfast.judge.tasks import find_task, load, task_names
from greenfast.spec.errors import UsageError, unknown


@write_ci_outputs
def run(args: argparse.Namespace) -> int:
    """Judge the solution; prints each gate when it ends, then the verdict and where the artifacts are."""
    required = required_gates(args.require or ["all"])
    check_page(args.html)
    asked = args.problem or _named_problem(find_solution(args.solution))
    task = load(find_task(import_problem(asked, args.out, args.workloads)))
    if args.traces is not None:
        check_traces(args.traces, task.folder)
    found = find_solution(import_solution(args.solution, task.folder, args.out))
    request = request_of(args, task, found.config.target)
    reference = args.against or task.config.defaults.baseline
    kept = load_kept_records(args, request, task.folder)  # not of the solution's folder, whose author could write one
    note = ""
    if args.arch is None and not found.config.target:
        request, note = arch_from_cached_record(request, kept, Path(reference).stem, found.config.name)
    baseline = load_baseline(request, reference)
    candidate = load_solution(request, found)
    chosen = args.shapes is not None or args.seeds is not None
    request = add_check_plan(request, None, chosen=chosen, seed=args.exam_seed, public=args.seeds is not None)
    outcome = judged(args, request, baseline, candidate, kept)
    if args.traces is not None:
        write_traces(args.traces, outcome.record, task.folder)
    show_outcome(outcome, args.json, note)
    partial = (chosen or args.exam_seed is not None) and is_partial(request)
    return write_verdict(args, outcome.record, exit_code(outcome.record, required, partial))


def exit_code(record: Record, required: set[str], partial: bool) -> int:
    """Return 0 if the required gates hold, the first failed gate's code, or 4 if something was not judged.

    Return 6 if all is well but for a check of a required gate that was not done.
    partial: whether options left out a part of the exam. A record with a PENDING gate has no decision for that.
    """
    for result in record.gates:
        if result.status == "FAIL":
            return GATES[result.gate]
    undecided = any(record.gate_status(gate) == "PENDING" for gate in required)
    if undecided or partial or record.decision not in ("MERGE", "PENDING", "UNCHECKED"):
        return OPEN
    return UNCHECKED if any(gate.unchecked for gate in record.gates if gate.gate in required) else 0


def _named_problem(found: ResolvedSolution) -> str:
    """Return the known problem that the solution names. Raises UsageError if it names none."""
    named = found.config.problem
    if not named:
        raise UsageError(f"{found.path}: names no problem; --problem names a task or its folder")
    if named not in task_names():
        raise unknown(f"problem of {found.path}", named, task_names())
    return named

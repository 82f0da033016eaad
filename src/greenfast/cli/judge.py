"""``greenfast judge``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.text import Text

from greenfast.cli.console import GateConsole, show, status
from greenfast.cli.progress import ProgressLine
from greenfast.judge.cached_timing import use_recorded_target
from greenfast.judge.check_plan import add_check_plan
from greenfast.judge.formats.converted import DEFINITION
from greenfast.judge.formats.traces import write_traces
from greenfast.judge.gates.registry import GATES
from greenfast.judge.implementation import build_implementation
from greenfast.judge.pages import write_page
from greenfast.judge.record_io import load_kept_records, sealed_json
from greenfast.judge.record_schema import Record
from greenfast.judge.report import formatting
from greenfast.judge.report.junit import junit, junit_error
from greenfast.judge.report.markdown import short_form
from greenfast.judge.request import read_request
from greenfast.judge.store import check_output_file, write_whole
from greenfast.judge.subject import find_subject
from greenfast.judge.task import LoadedTask
from greenfast.judge.validate import Outcome, validate
from greenfast.spec.errors import GreenfastError, MachineError, UsageError

#: Exit codes of runs in which no gate failed: something was not judged; a check of a required gate was not done.
UNDECIDED, UNCHECKED = 4, 6


@dataclass(frozen=True)
class _Verdict:
    """The data for a run's outputs: its outcome, task, exit code and notes for the console."""

    outcome: Outcome
    task: LoadedTask
    code: int
    note: str


def run(args: argparse.Namespace) -> int:
    """Judge the candidate, then write the outputs; ``--junit`` and ``--summary`` also for a run without a verdict.

    A JUnit file of an earlier run is removed first, so that it is not taken for this run's result if this run is
    killed.
    """
    check_output_file(args.junit, "--junit")
    if args.junit is not None:
        args.junit.unlink(missing_ok=True)
    _append(args.summary, "")
    try:
        check_output_file(args.html, "--html")
        verdict = _judge(args)
        _write_outputs(args, verdict)
    except (Exception, SystemExit) as e:
        code = e.exit_code if isinstance(e, GreenfastError) else MachineError.exit_code
        error = str(e) or type(e).__name__
        if args.junit is not None:
            write_whole(args.junit, junit_error(args.subject, error, code))
        details = formatting.bullets([formatting.literal(error), f"Exit code: {code}"])
        _append(args.summary, f"**no verdict**: {formatting.code(args.subject)}\n\n{details}\n\n")
        raise
    if args.junit is not None:
        write_whole(args.junit, junit(verdict.outcome.record, verdict.code))
    _append(args.summary, f"{short_form(verdict.outcome.record)}- Exit code: {verdict.code}\n\n")
    return verdict.code


def _judge(args: argparse.Namespace) -> _Verdict:
    """Judge the candidate; print each gate when it ends."""
    required = required_gates(args.require)
    with ProgressLine(f"reading {args.subject}"):
        subject = find_subject(
            args.subject,
            problem=args.problem,
            candidate=args.candidate,
            baseline=args.baseline,
            workloads=args.workloads,
            out=args.out,
        )
    task = subject.task
    if args.traces is not None and not (task.folder / DEFINITION).is_file():
        raise UsageError(f"--traces {args.traces}: the problem is no definition of FlashInfer-Trace")
    request = read_request(task, args, arch=args.arch or subject.target or None)
    with ProgressLine("reading the kept records"):
        kept = [] if args.no_quote else load_kept_records(request, args.quote, _warn)
    note = ""
    if args.arch is None and not subject.target:
        named, request = request.target.name, use_recorded_target(request, kept, *subject.names)
        if request.target.name != named:
            note = f"  - target {request.target.name}, from the kept record, as there is no GPU; --arch selects another"
    with ProgressLine("loading the baseline and the candidate"):
        baseline = build_implementation(request, subject.baseline, is_reference=True)
        candidate = build_implementation(request, subject.candidate)
    chosen = args.shapes is not None or args.seeds is not None
    request = add_check_plan(
        request, candidate.rung, chosen=chosen, seed=args.exam_seed, public=args.seeds is not None
    )  # fmt: skip
    with GateConsole(to_stderr=args.json) as console:
        outcome = validate(
            request, baseline, candidate, console, required=args.speedup, profile=not args.no_profile, kept=kept
        )
    notes = [*([note] if note else []), *(f"  - not judged: {part}" for part in task.config.left_out)]
    return _Verdict(outcome, task, exit_code(outcome.record, required, request.is_partial), "\n".join(notes))


def _write_outputs(args: argparse.Namespace, verdict: _Verdict) -> None:
    """Write the page and the traces that the options name; print the verdict, or the record for ``--json``."""
    outcome, task = verdict.outcome, verdict.task
    with ProgressLine(f"writing {args.html}"):
        write_page(args.html, outcome.record, outcome.folder, task, outcome.built)
    if args.traces is not None:
        write_traces(args.traces, outcome.record, task.folder)
    if args.json:
        print(sealed_json(outcome.record, conclusions=True), end="")
    else:
        _show(outcome, verdict.note)


def _show(outcome: Outcome, note: str) -> None:
    record = outcome.record
    sides = f"  {record.candidate.variant} against {record.baseline.variant}, {record.format}"
    show(Text.assemble("\n", status(record.decision), sides))
    for reason in record.reasons:
        show(Text(f"  - {reason}"))
    if note:
        show(Text(note))
    show(f"\n{outcome.folder}")


def required_gates(names: Sequence[str]) -> set[str]:
    """Return the gates of ``--require``, in capitals. Raises UsageError for an unknown name."""
    allowed = {name.lower(): name for name in GATES}
    if unknown := set(names) - {*allowed, "all"}:
        raise UsageError(f"--require {', '.join(sorted(unknown))}: allowed are {', '.join(allowed)} and all")
    return set(GATES) if "all" in names else {allowed[name] for name in names}


def exit_code(record: Record, required: set[str], partial: bool) -> int:
    """Return 0 if the required gates hold on the whole exam, else the code of the first gate that failed.

    Return UNDECIDED if no gate failed and something was not judged, UNCHECKED if only a check of a required gate was
    not done. partial: True if options left out a part of the exam. A record with a PENDING gate then has no decision.
    A kept record covers that part if the decision is MERGE, and counts only if PERFORMANCE is required.
    """
    for result in record.gates:
        if result.status == "FAIL":
            return GATES[result.gate].exit_code
    undecided = any(record.gate_status(gate) == "PENDING" for gate in required)
    lacks_cases = record.decision == "INCOMPLETE" and (record.quoted is None or "PERFORMANCE" in required)
    if undecided or lacks_cases or (partial and record.decision != "MERGE"):
        return UNDECIDED
    return UNCHECKED if any(gate.unchecked for gate in record.gates if gate.gate in required) else 0


def _append(file: Path | None, text: str) -> None:
    if file is None:
        return
    if file.is_dir():
        raise UsageError(f"--summary {file}: a folder; give the name of a file")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("a", encoding="utf-8") as stream:
            stream.write(text)
    except OSError as e:
        raise MachineError(f"--summary {file}: cannot be written ({e.strerror})") from e


def _warn(text: str) -> None:
    print(f"greenfast: {text}", file=sys.stderr)

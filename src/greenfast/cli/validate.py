"""``greenfast validate``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.text import Text

from greenfast.cli.ci import write_ci_outputs, write_verdict
from greenfast.cli.console import GateConsole, decision_code, required_gates, show, status
from greenfast.cli.page import check_page, write_page
from greenfast.cli.request import request_of
from greenfast.judge.cached_timing import (
    StoredRecord,
    find_evidence_folders,
    find_target,
    load_records,
    load_required_records,
)
from greenfast.judge.digest import sealed_json
from greenfast.judge.implementation import Implementation
from greenfast.judge.request import Request, add_check_plan
from greenfast.judge.validate import Outcome, validate
from greenfast.judge.variant import Variant
from greenfast.spec.arch import Target


@write_ci_outputs
def run(args: argparse.Namespace) -> int:
    """Judge the candidate; prints each gate when it ends, then the verdict and where the artifacts are."""
    required = required_gates(args.require)
    check_page(args.html)
    request = request_of(args)
    config = request.task.config
    candidate = config.variant(args.candidate or config.defaults.candidate)
    rung = next((r for r in config.rungs if r.name == candidate.name), None)
    # Without a baseline the candidate is compared with the rung before it.
    before = rung.after if rung is not None and args.candidate else None
    baseline = config.variant(args.baseline or before or config.defaults.baseline)
    chosen = args.shapes is not None or args.seeds is not None
    request = add_check_plan(request, rung, chosen=chosen, seed=args.exam_seed, public=args.seeds is not None)
    kept = load_kept_records(args, request, request.task.folder)
    note = ""
    if args.arch is None:
        request, note = arch_from_cached_record(request, kept, baseline.name, candidate.name)
    outcome = judged(args, request, baseline, candidate, kept)
    show_outcome(outcome, args.json, note)
    code = decision_code(outcome.record.decision, outcome.record.gates, required)
    return write_verdict(args, outcome.record, code)


def arch_from_cached_record(
    request: Request, kept: Sequence[StoredRecord], baseline: str, candidate: str
) -> tuple[Request, str]:
    """Return the request for the target of a stored record, so that every gate can decide without a GPU, and a note.

    Return the unchanged request and an empty note if no record compares the two, or if kernels cannot run.
    """
    config = request.task.config
    if kept and request.cannot_run() is None:
        measured = find_target(kept, config.name, request.format, baseline, candidate)
        if measured is not None and measured != request.target.name:
            note = f"  - target {measured}, from the kept record, as there is no GPU; --arch selects another"
            return replace(request, target=Target.parse(measured)), note
    return request, ""


def judged(
    args: argparse.Namespace,
    request: Request,
    baseline: Variant | Implementation,
    candidate: Variant | Implementation,
    kept: Sequence[StoredRecord],
) -> Outcome:
    """Run baseline and candidate through the gates, print each gate, and write the page of ``--html``."""
    with GateConsole(to_stderr=args.json) as console:
        outcome = validate(
            request,
            baseline,
            candidate,
            console,
            required=args.required,
            profile=not args.no_profile,
            kept=kept,
        )
    write_page(args.html, outcome.record, outcome.folder, request.task, outcome.built)
    return outcome


def show_outcome(outcome: Outcome, as_json: bool, note: str = "") -> None:
    """Print the verdict with its reasons and the folder of the artifacts, or the record as JSON."""
    record = outcome.record
    if as_json:
        print(sealed_json(record), end="")
        return
    sides = f"  {record.candidate.variant} against {record.baseline.variant}, {record.format}"
    show(Text.assemble("\n", status(record.decision), sides))
    for reason in record.reasons:
        show(Text(f"  - {reason}"))
    if note:
        show(Text(note))
    show(f"\n{outcome.folder}")


def load_kept_records(args: argparse.Namespace, request: Request, *folders: Path) -> list[StoredRecord]:
    """The records that PERFORMANCE may be quoted from; none are searched for if it can be measured.

    folders: of tasks, next to which they are kept.
    """
    if args.quote is not None:
        return load_required_records(args.quote)
    if args.no_quote or request.cannot_time() is None:
        return []
    found = dict.fromkeys(evidence for folder in folders for evidence in find_evidence_folders(folder))
    return [kept for folder in found for kept in load_records(folder, _warn)]


def _warn(text: str) -> None:
    print(f"greenfast: {text}", file=sys.stderr)

"""``greenfast report``: saved runs as a report, a comparison, a table of verdicts, or a history."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import msgspec
from rich.text import Text

from greenfast.cli.console import show, table
from greenfast.cli.progress import ProgressLine
from greenfast.judge.pages import write_page
from greenfast.judge.record_io import (
    PERFORMANCE,
    RECORD,
    PerformanceFile,
    check_demands,
    find_outdated,
    read_record,
    record_schema,
    records_below,
    resolve_aliases,
    sealed_json,
)
from greenfast.judge.record_schema import AnyRecord, PhaseRecord, Record
from greenfast.judge.report.compare import compare_markdown, compare_timings
from greenfast.judge.report.history import HEADER, histories, history_page
from greenfast.judge.report.ladder import ladder_table
from greenfast.judge.report.markdown import report, short_form
from greenfast.judge.report.plots import save_plot
from greenfast.judge.store import check_output_file, read_json, to_json, write_whole
from greenfast.spec.errors import UsageError

_REPORT, _HISTORY, _COMPARISON, _TABLE = "the report of a run", "a folder of runs", "--compare", "--table"
#: Option -> its purpose.
_FOR = {
    "short": (_REPORT,),
    "plot": (_REPORT,),
    "html": (_REPORT, _HISTORY),
    "git": (_HISTORY,),
    "shape": (_HISTORY,),
    "speedup": (_COMPARISON,),
    "out": (_COMPARISON,),
}
_SHOWN = 3


def run(args: argparse.Namespace) -> int:
    """Print the reports of saved runs, their comparison, one table of their verdicts, a history, or the schema."""
    if args.schema:
        print(json.dumps(record_schema(), indent=2))
        return 0
    runs: list[Path] = args.run
    if not runs:
        raise UsageError("give a run's folder or its record.json, a folder of runs, or --schema")
    is_folder_of_runs = len(runs) == 1 and runs[0].is_dir() and not (runs[0] / RECORD).exists()
    kind = _COMPARISON if args.compare else _TABLE if args.table else _HISTORY if is_folder_of_runs else _REPORT
    for option, kinds in _FOR.items():
        if getattr(args, option) and kind not in kinds:
            raise UsageError(f"--{option} is for {' or '.join(kinds)}")
    if args.json and args.short:
        raise UsageError("--json prints the whole record; leave out --short")
    check_output_file(args.html, "--html")
    if kind == _COMPARISON:
        if len(runs) != 2:
            raise UsageError(f"--compare: give two runs, a baseline and a candidate; these are {len(runs)}")
        _compare(runs[0], runs[1], args.speedup, args.out or Path("results/COMPARE.md"), as_json=args.json)
    elif kind == _TABLE:
        pairs = [(str(path), _require_comparison(read_record(path), path)) for path in runs]
        print(_verdicts(pairs) if args.json else ladder_table(pairs, aged=find_outdated(pairs)))
    elif kind == _HISTORY:
        _show_history(runs[0], args)
    else:
        _show_reports(runs, args)
    return 0


def _verdicts(pairs: list[tuple[str, Record]]) -> str:
    """Return path, decision, reasons and speedups of records as JSON."""
    rows = [
        {
            "run": path,
            "task": record.task,
            "baseline": record.baseline.variant,
            "candidate": record.candidate.variant,
            "decision": record.decision,
            "reasons": record.reasons,
            "speedups": msgspec.to_builtins(record.speedups),
        }
        for path, record in pairs
    ]
    return json.dumps(rows, indent=2)


def _compare(baseline: Path, candidate: Path, required: float | None, out: Path, *, as_json: bool) -> None:
    """Write and print the comparison of two runs (folders, or their perf_baseline.json).

    Raises UsageError for files without timings, of different tasks or formats, or timed by different methods.
    """
    files = [path / PERFORMANCE if path.is_dir() else path for path in (baseline, candidate)]
    a, b = (read_json(path, PerformanceFile, "perf_baseline.json") for path in files)
    for field, x, y in (("task", a.task, b.task), ("format", a.format, b.format)):
        if x and y and x != y:
            raise UsageError(f"the runs differ in {field}: {x} ({files[0]}) and {y} ({files[1]})")
    task = a.task or b.task
    a, b = resolve_aliases(a, task), resolve_aliases(b, task)
    rows = (one.require_results(str(file)) for one, file in zip((a, b), files, strict=True))
    comparisons = compare_timings(*rows, required=required)
    text = compare_markdown(comparisons)
    write_whole(out, text)
    print(to_json(comparisons) if as_json else text, end="")


def _require_comparison(record: AnyRecord, path: Path) -> Record:
    if not isinstance(record, Record):
        raise UsageError(f"{path}: a run of one variant; a table or plot needs a comparison's record")
    return record


def _show_history(folder: Path, args: argparse.Namespace) -> None:
    with ProgressLine(f"reading the runs below {folder}"):
        records, skipped = records_below(folder, git=args.git)
    if not records:
        raise UsageError("; ".join([f"{folder}: no record of a run is below it", *skipped[:1]]))
    kernels = histories(records, args.shape)
    if args.json:
        print(to_json({"kernels": kernels, "left_out": skipped}), end="")
    for kernel in () if args.json else kernels:
        title = f"{kernel.title}; {kernel.shape or 'nothing timed'}, {kernel.cache} L2"
        show(table(HEADER, kernel.rows(), title=title))
    if args.html:
        with ProgressLine(f"writing {args.html}"):
            write_whole(args.html, history_page(f"Runs below {folder}", kernels, skipped))
    if args.json:
        return
    for reason in skipped[:_SHOWN]:
        show(Text(f"  - left out: {reason}"))
    if len(skipped) > _SHOWN:
        show(f"  - and {len(skipped) - _SHOWN} more files")
    if args.html:
        show(f"\n{args.html}")


def _show_reports(runs: list[Path], args: argparse.Namespace) -> None:
    if (args.plot or args.html) and len(runs) > 1:
        raise UsageError(f"--{'plot draws' if args.plot else 'html is of'} one run; give one")
    texts: list[str] = []
    for path in runs:
        record = read_record(path)
        for reason in check_demands(record).reasons:
            print(f"greenfast: {path}: {reason}; its decision follows from its options", file=sys.stderr)
        if args.plot:
            save_plot(_require_comparison(record, path), args.plot)
        if args.html:
            with ProgressLine(f"writing {args.html}"):
                write_page(args.html, record, path)
        if args.json:
            texts.append(_json_text(record))
        else:
            print(args.html or _text(record, args.short, args.plot))
    if args.json:
        print(texts[0] if len(texts) == 1 else f"[{','.join(texts)}]", end="")


def _json_text(record: AnyRecord) -> str:
    """Return a record and its conclusions as JSON; a record of phases or of a benchmark has none."""
    return to_json(record) if isinstance(record, PhaseRecord) else sealed_json(record, conclusions=True)


def _text(record: AnyRecord, short: bool, plot: Path | None) -> str:
    if short and isinstance(record, Record):
        return short_form(record)
    return report(record, plot=str(plot) if plot else None)

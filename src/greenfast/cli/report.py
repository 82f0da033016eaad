"""``greenfast report``."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from greenfast.cli.page import check_page, write_page
from greenfast.judge.record_io import check_demands, find_outdated, read_record, record_schema
from greenfast.judge.record_schema import AnyRecord, Record
from greenfast.judge.report.ladder import ladder_table
from greenfast.judge.report.markdown import report, short_form
from greenfast.judge.report.plots import save_plot
from greenfast.spec.errors import MachineError, UsageError


def run(args: argparse.Namespace) -> int:
    """Print the reports of saved runs, or one table of their verdicts, or the schema of records."""
    if args.schema:
        print(json.dumps(record_schema(), indent=2))
        return 0
    if not args.run:
        raise UsageError("give a run's folder or its record.json, or --schema")
    records = {path: read_record(path) for path in args.run}
    if args.table or args.plot:
        wrong = [str(p) for p, r in records.items() if not isinstance(r, Record)]
        if wrong:
            raise UsageError(f"{', '.join(wrong)}: a run of one variant; a table or plot needs a comparison's record")
    if args.table:
        pairs = [(str(p), r) for p, r in records.items() if isinstance(r, Record)]
        print(ladder_table(pairs, aged=find_outdated(pairs)))
        return 0
    if (args.plot or args.html) and len(records) > 1:
        raise UsageError(f"--{'plot draws' if args.plot else 'html is of'} one run; give one")
    check_page(args.html)
    for path, record in records.items():
        for reason in check_demands(record).reasons:
            print(f"greenfast: {path}: {reason}; its decision follows from what it asked", file=sys.stderr)
        if args.html:
            write_page(args.html, record, path)
            print(args.html)
        else:
            print(_text(record, args.short, args.plot))
    return 0


def _text(record: AnyRecord, short: bool, plot: Path | None) -> str:
    if plot:
        if plot.suffix not in (".png", ".svg"):
            raise UsageError(f"--plot {plot}: the name must end in .png or .svg")
        try:
            if isinstance(record, Record):
                save_plot(record, plot)
        except OSError as e:
            raise MachineError(f"{plot} cannot be written ({e.strerror})") from e
    if short and isinstance(record, Record):
        return short_form(record)
    return report(record, plot=str(plot) if plot else None)

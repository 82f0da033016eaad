"""``greenfast history``."""

from __future__ import annotations

import argparse

from rich.text import Text

from greenfast.cli.console import show, table
from greenfast.cli.page import check_page
from greenfast.judge.history import records_below
from greenfast.judge.report.history import HEADER, histories
from greenfast.judge.report.webpage.history import history_page
from greenfast.judge.store import write_whole
from greenfast.spec.errors import UsageError

_SHOWN = 3


def run(args: argparse.Namespace) -> int:
    """Print a table per kernel, and write the page if requested."""
    check_page(args.html)
    records, skipped = records_below(args.folder, git=args.git)
    if not records:
        raise UsageError("; ".join([f"{args.folder}: no record of validate or bench is below it", *skipped[:1]]))
    found = histories(records, args.shape)
    for one in found:
        show(table(HEADER, one.rows(), title=f"{one.title}; {one.shape or 'nothing timed'}, {one.cache} L2"))
    for reason in skipped[:_SHOWN]:
        show(Text(f"  - left out: {reason}"))
    if len(skipped) > _SHOWN:
        show(f"  - and {len(skipped) - _SHOWN} more files")
    if args.html:
        write_whole(args.html, history_page(f"Runs below {args.folder}", found, skipped))
        show(f"\n{args.html}")
    return 0

"""``greenfast bench TASK --peers``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from rich.text import Text

from greenfast.bench.peers import compare_with_peers
from greenfast.cli.console import GateConsole, show, table
from greenfast.cli.request import request_of
from greenfast.judge.peers import OWN, PeerContender, PeerRow
from greenfast.judge.report.peers import console_table, headline, ratios, reasons
from greenfast.judge.store import to_json
from greenfast.spec.errors import UsageError

_NOT_HERE = ("seeds", "iters", "warmup", "processes", "require")


class PeersConsole(GateConsole):
    """A GateConsole that also says each shape as it has been timed: a run takes minutes."""

    def cell(self, rows: Sequence[PeerRow], contenders: Sequence[PeerContender]) -> None:
        """Print a shape's times in microseconds and its ratio."""
        times = [f"{r.contender} {r.median_us:.1f}" for r in rows if r.median_us is not None]
        ratio = "".join(f"; {OWN} / better FP8 peer {value:.3f}x" for value in ratios(rows, contenders).values())
        self._console.print(Text(f"{rows[0].shape:18}{', '.join(times)} µs{ratio}"), soft_wrap=True)


def beside_peers(args: argparse.Namespace) -> int:
    """Compare the task's default candidate with its peers; prints the tables and where record and report are."""
    given = [name for name in _NOT_HERE if getattr(args, name)]
    if given:
        raise UsageError(f"--{given[0]} is not for --peers, which takes --shapes or --grid, --rounds, --json")
    names, args.shapes = args.shapes, None  # they are those of the comparison, not of the task
    if names and args.grid:
        raise UsageError("--shapes and --grid: give one of them")
    request = request_of(args)
    config = request.task.config
    console = PeersConsole(to_stderr=args.json)
    with console:
        outcome = compare_with_peers(
            request,
            config.variant(config.defaults.candidate),
            console,
            shapes=names,
            grid=args.grid,
            rounds=args.rounds,
        )
    record = outcome.record
    if args.json:
        print(to_json(record), end="")
        return 0
    header, rows = console_table(record.rows, record.contenders)
    show(table(header, rows, title=f"{record.task} beside its peers: µs and TFLOP/s per call"))
    errors = [(row.contender, row) for row in record.accuracy]
    if errors:
        shown = [
            (" ".join(f"{n}={v}" for n, v in row.dims.items()), row.inputs, name, *_errors(row.error, row.kernel_error))
            for name, row in errors
        ]
        show(table(("dims", "inputs", "contender", "error", "kernel error"), shown, title="relative errors"))
    show(f"\n{headline(record.rows, record.contenders)}")
    for reason in reasons(record):
        show(Text(f"  - {reason}"))
    show(f"\n{outcome.folder}")
    return 0


def _errors(*values: float | None) -> tuple[str, ...]:
    return tuple("-" if value is None else f"{value:.3g}" for value in values)

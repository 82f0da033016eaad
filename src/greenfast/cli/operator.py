"""``greenfast bench --operator``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from greenfast.bench.operator import measure_operator
from greenfast.bench.operator_record import SpeedRow
from greenfast.bench.operator_report import clocks_line, error_table, headline, host_table, quantize_table, speed_table
from greenfast.cli.console import show
from greenfast.judge.store import to_json
from greenfast.spec.errors import UsageError

_NOT_HERE = (
    "task", "variant", "from_env", "peers", "grid", "rounds", "shapes", "seeds", "format", "iters", "warmup",
    "processes", "require",
)  # fmt: skip


def bench_operator(args: argparse.Namespace) -> int:
    """Measure the operator; prints each shape as it is done, the tables, and where record and report are."""
    given = [name for name in _NOT_HERE if getattr(args, name, None)]
    if given:
        name = given[0] if given[0] == "task" else f"--{given[0].replace('_', '-')}"
        raise UsageError(f"{name} is not for bench --operator, which takes --out and --json")

    def watch(rows: Sequence[SpeedRow]) -> None:
        dims = " ".join(f"{name}={value}" for name, value in rows[0].dims.items())
        times = ", ".join(f"{row.call} {row.median_us:.1f}" for row in rows)
        if not args.json:
            show(f"{dims}: {times} µs")

    outcome = measure_operator(args.out, args.command, watch)
    if args.json:
        print(to_json(outcome.record), end="")
        return 0
    record = outcome.record
    for table in (speed_table(record), quantize_table(record), host_table(record), error_table(record)):
        show(f"\n{table}")
    show(f"\n{headline(record)} {clocks_line(record)}\n\n{outcome.folder}")
    return 0

"""``greenfast bench``."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from dataclasses import replace

from greenfast.cli.console import GateConsole, exit_code, required_gates, show, table
from greenfast.cli.operator import bench_operator
from greenfast.cli.peers import beside_peers
from greenfast.cli.request import request_of
from greenfast.judge.bench import bench
from greenfast.judge.choose import chosen_rung
from greenfast.judge.store import to_json
from greenfast.judge.task import TaskConfig
from greenfast.judge.variant import Variant
from greenfast.spec.errors import UsageError


def variant_of_environment(config: TaskConfig, environment: Mapping[str, str]) -> Variant:
    """The variant that the task's toggles in the environment make. Raises UsageError for what is no whole number."""
    given = {}
    for name in config.toggles:
        if name in environment:
            try:
                given[name] = int(environment[name])
            except ValueError:
                raise UsageError(
                    f"{name}={environment[name]!r}: allowed values are {config.toggles[name].values}"
                ) from None
    return config.toggle_variant(given)


def run(args: argparse.Namespace) -> int:
    """Check and time one variant; prints each gate, the timings and where the artifacts are."""
    if args.operator:
        return bench_operator(args)
    if args.task is None:
        raise UsageError("bench needs a task (see `greenfast tasks`), or --operator")
    if args.peers:
        return beside_peers(args)
    if args.grid or args.rounds is not None:
        raise UsageError("--grid and --rounds are for --peers")
    required = required_gates(args.require)
    if "evidence" in args.require:
        raise UsageError("--require evidence: bench does not look at the machine code; validate does")
    request = request_of(args)
    config = request.task.config
    if args.from_env:
        variant = variant_of_environment(config, os.environ)
        # The command alone would not repeat the run.
        toggles = [f"{name}={os.environ[name]}" for name in config.toggles if name in os.environ]
        request = replace(request, command=" ".join([*toggles, request.command]))
    elif args.variant == "auto":
        variant = config.variant(chosen_rung(request.task, request.target, request.format, request.shapes))
    else:
        variant = config.variant(args.variant or config.defaults.candidate)
    with GateConsole(to_stderr=args.json) as console:
        outcome = bench(request, variant, console)
    if args.json:
        print(to_json(outcome.record), end="")
    else:
        rows = [
            (r.shape, str(r.seed), r.cache, f"{r.p50_us:.2f}", f"{r.p90_us:.2f}", f"{r.mean_us:.2f}", f"{r.std_us:.2f}")
            for r in outcome.record.side.timing
        ]
        if rows:
            show(table(("shape", "seed", "L2", "p50 µs", "p90 µs", "mean µs", "std µs"), rows, title=variant.name))
        show(f"\n{outcome.folder}")
    return exit_code(outcome.record.gates, required)

"""``greenfast bench``: one kernel, or a comparison of backends."""

from __future__ import annotations

import argparse
import importlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace

from rich.text import Text

from greenfast.bench.comparison import Comparison
from greenfast.bench.ratios import headline, ratios
from greenfast.bench.record_io import operator_comparison, routing_comparison, serving_comparison
from greenfast.bench.record_schema import Row, SpeedupPair
from greenfast.bench.report import clocks_line, console_table, reasons
from greenfast.bench.runner import BenchResult, compare
from greenfast.bench.serving_report import tables
from greenfast.cli.console import GateConsole, exit_code, required_gates, show, table
from greenfast.cli.page import check_page, write_page
from greenfast.cli.request import request_of
from greenfast.judge.bench import bench
from greenfast.judge.digest import sealed_json
from greenfast.judge.report import formatting
from greenfast.judge.task import TaskConfig
from greenfast.judge.tasks import load_peers
from greenfast.judge.variant import Variant
from greenfast.judge.variant_choice import chosen_rung
from greenfast.spec.errors import UsageError, unknown

#: The task whose problem the operator and serving solve.
_OPERATOR_TASK = "fp8_attention"
#: Rounds of each shape in a quick run.
_QUICK_ROUNDS = 10


def variant_of_environment(config: TaskConfig, environment: Mapping[str, str]) -> Variant:
    """The variant that the environment's toggles select. Raises UsageError for anything but whole numbers."""
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
    """Measure, and print the results and the paths of the artifacts."""
    if args.what == "parallel":
        return _parallel(args)
    check_page(args.html)
    return _kernel(args) if args.what == "kernel" else _comparison(args)


def _kernel(args: argparse.Namespace) -> int:
    """Check and time one variant; prints each gate and the timings."""
    required = required_gates(args.require)
    if "evidence" in args.require:
        raise UsageError("--require evidence: bench does not look at the machine code; validate does")
    request = request_of(args)
    config = request.task.config
    if args.from_env:
        variant = variant_of_environment(config, os.environ)
        # The command without the environment would not repeat the run.
        toggles = [f"{name}={os.environ[name]}" for name in config.toggles if name in os.environ]
        request = replace(request, command=" ".join([*toggles, request.command]))
    elif args.variant == "auto":
        variant = config.variant(chosen_rung(request.task, request.target, request.format, request.shapes))
    else:
        variant = config.variant(args.variant or config.defaults.candidate)
    with GateConsole(to_stderr=args.json) as console:
        outcome = bench(request, variant, console)
    write_page(args.html, outcome.record, outcome.folder, request.task)
    if args.json:
        print(sealed_json(outcome.record), end="")
    else:
        rows = [
            (r.shape, str(r.seed), r.cache, f"{r.p50_us:.2f}", f"{r.p90_us:.2f}", f"{r.mean_us:.2f}", f"{r.std_us:.2f}")
            for r in outcome.record.side.timing
        ]
        if rows:
            show(table(("shape", "seed", "L2", "p50 µs", "p90 µs", "mean µs", "std µs"), rows, title=variant.name))
        show(f"\n{outcome.folder}")
    return exit_code(outcome.record.gates, required)


class ComparisonConsole(GateConsole):
    """A GateConsole that also prints each shape once it has been timed, as a run takes a minute."""

    def __init__(self, versus: Sequence[SpeedupPair], *, to_stderr: bool) -> None:
        super().__init__(to_stderr=to_stderr)
        self._versus = versus

    def cell(self, rows: Sequence[Row]) -> None:
        """Print a shape's times in microseconds and its ratios."""
        times = [f"{r.backend} {r.median_us:.1f}" for r in rows if r.median_us is not None]
        found = [f"; {v.title} {ratio:.3f}x" for v in self._versus for ratio in ratios(rows, v).values()]
        text = f"{rows[0].shape:18}{', '.join(times)} µs{''.join(found)}"
        self._console.print(Text(text), soft_wrap=True)


def _comparison(args: argparse.Namespace) -> int:
    """Compare backends; print each finished shape, and the tables."""
    names, args.shapes = args.shapes, None  # they are of the comparison, not of the task
    if args.what != "peers":
        args.task = _OPERATOR_TASK
    args.seeds = args.format = args.arch = None
    request = request_of(args)
    comparison: Comparison
    if args.what == "operator":
        comparison, variant = operator_comparison(), None
    elif args.what == "routing":
        comparison, variant = routing_comparison(), None
    elif args.what == "serving":
        comparison, variant = _serving(args), None
    else:
        config = request.task.config
        comparison, variant = load_peers(request.task).peers(), config.variant(config.defaults.candidate)
    console = ComparisonConsole(comparison.versus, to_stderr=args.json)
    with console:
        outcome = compare(
            comparison, request, variant, console, shapes=names, grid=args.grid, rounds=args.rounds
        )  # fmt: skip
    write_page(args.html, outcome.record, outcome.folder)
    if args.json:
        print(sealed_json(outcome.record), end="")
    else:
        _show(outcome)
    return 0


def _serving(args: argparse.Namespace) -> Comparison:
    """Return the comparison of the options. Raises UsageError for unknown cases and a missing library file."""
    if args.fa3_library and not args.fa3_library.is_file():
        raise UsageError(f"--fa3-library {args.fa3_library}: no such file")
    if args.quick and args.rounds is None:
        args.rounds = _QUICK_ROUNDS
    library = str(args.fa3_library.resolve()) if args.fa3_library else ""
    return serving_comparison(args.cases, quick=args.quick, fa3_library=library)


def _parallel(args: argparse.Namespace) -> int:
    """Compare on several GPUs; print each row on one rank. Raises UsageError for unknown cases and backends."""
    module = importlib.import_module("greenfast.bench.parallel")  # by its name, as it loads PyTorch
    cases = {case.name: case for case in (*module.CASES, *module.CPU_CASES)}
    for what, given, allowed in (("case", args.cases, cases), ("contender", args.contenders, module.BACKENDS)):
        for name in given or ():
            if name not in allowed:
                raise unknown(f"{what} of bench parallel", name, allowed)
    module.run(
        args.out,
        cases=[cases[name] for name in args.cases or ()],
        backends=tuple(args.contenders or module.BACKENDS),
        rounds=args.rounds,
    )
    return 0


def _show(outcome: BenchResult) -> None:
    record = outcome.record
    if record.comparison == "serving":
        for one in tables(record):
            show(table(one.header, one.rows, title=one.title))
    else:
        header, rows = console_table(record)
        show(table(header, rows, title=f"{record.what}: µs and TFLOP/s per call"))
    if record.host:
        host = [(r.backend, f"{r.median_us:.1f}", f"{r.least_us:.1f}") for r in record.host]
        show(table(("contender", "median µs", "least µs"), host, title="host time of an eager call"))
    if record.accuracy:
        errors = [
            (
                formatting.dims(r.dims),
                r.inputs,
                r.backend,
                formatting.error(r.error),
                formatting.error(r.kernel_error),
            )
            for r in record.accuracy
        ]
        show(table(("dims", "inputs", "contender", "error", "kernel error"), errors, title="relative errors"))
    show(f"\n{headline(record.rows, record.versus)}. {clocks_line(record)}")
    for reason in reasons(record):
        show(Text(f"  - {reason}"))
    show(f"\n{outcome.folder}")

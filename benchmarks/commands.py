"""The commands ``kernel``, ``peers``, ``sdpa``, ``routing``, ``serving``, ``parallel`` and ``report``."""

from __future__ import annotations

import argparse
import json
import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from rich.text import Text

from benchmarks import parallel as several_gpus
from benchmarks import routing as many_shapes
from benchmarks import sdpa as attention
from benchmarks import serving as paged
from benchmarks.comparison import Comparison
from benchmarks.options import make_parser
from benchmarks.parallel_backends import BACKENDS as PARALLEL_BACKENDS
from benchmarks.pictures import benchmark_page, save_benchmark_plot
from benchmarks.records import Benchmark, Row, SpeedupPair, read_benchmark, record_schema
from benchmarks.report import (
    benchmark_report,
    clocks_line,
    console_table,
    headline,
    ratios,
    reasons,
    tables,
)
from benchmarks.runner import BenchResult, compare
from benchmarks.serving_cases import GROUPS
from greenfast.cli.console import GateConsole, required_gates, show, table
from greenfast.cli.values import numbers, rounds, words
from greenfast.judge.bench import bench
from greenfast.judge.digest import sealed_json
from greenfast.judge.pages import digest, write_page
from greenfast.judge.report import formatting
from greenfast.judge.request import Request, make_request
from greenfast.judge.store import check_output_file, write_whole
from greenfast.judge.task import TaskConfig
from greenfast.judge.tasks import find_task, load
from greenfast.judge.variant import Variant
from greenfast.judge.variant_choice import chosen_rung
from greenfast.spec.errors import MachineError, UsageError, unknown

#: The task whose problem all comparisons solve.
_TASK = "fp8_attention"
#: Rounds of each shape in a quick run.
_QUICK_ROUNDS = 10


def _add_run_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--device", default="auto", help="auto, none, emulator, or a GPU's number (default: %(default)s)"
    )
    parser.add_argument("--timeout", type=float, default=60.0, metavar="S", help="seconds that a GPU step may take")
    parser.add_argument("--out", type=Path, default=Path("results"), help="results folder (default: %(default)s)")
    parser.add_argument("--html", type=Path, metavar="FILE", help="also write the report as one HTML file")
    parser.add_argument("--json", action="store_true", help="print the record as JSON instead of text")


def _request(args: argparse.Namespace, command: str) -> Request:
    """Load the task and check the shared options. Raises UsageError or MachineError."""
    given = vars(args)
    return make_request(
        load(find_task(given.get("task", _TASK))),
        shapes=args.shapes if "task" in given else None,  # otherwise they are of the comparison
        seeds=given.get("seeds"), fmt=given.get("format"), arch=given.get("arch"), device=args.device,
        warmup=given.get("warmup"), iters=given.get("iters"), processes=given.get("processes"),
        timeout_s=args.timeout, out=args.out, command=command,
    )  # fmt: skip


def _command(*arguments: str) -> str:
    return shlex.join(["python", "-m", "benchmarks", *arguments])


def kernel(argv: Sequence[str]) -> int:
    """Check and time one variant; print each gate and the timings. Return 1 if a gate failed."""
    parser = make_parser("kernel", "Check one variant of a task and time it over shapes.")
    parser.add_argument("task", help="a task's name (see `greenfast list`), or the folder of a task of your own")
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--variant", help="a name, TOGGLE=VALUE,..., or auto for what the shapes should take (default: the candidate)"
    )
    which.add_argument("--from-env", action="store_true", help="read the task's toggles from the environment")
    parser.add_argument("--shapes", type=words, metavar="A,B", help="shapes of the task's config (default: its own)")
    parser.add_argument("--seeds", type=numbers, metavar="0,1", help="public seeds of the inputs (default: the task's)")
    parser.add_argument("--format", help="number format of the task's config (default: its own)")
    parser.add_argument("--arch", metavar="SM", help="target, such as sm_89 (default: the GPU's, else the task's)")
    parser.add_argument("--iters", type=int, metavar="N", help="timed launches per shape, seed and cache state")
    parser.add_argument("--warmup", type=int, metavar="N", help="untimed launches before them")
    parser.add_argument("--processes", type=int, metavar="N", help="fresh processes to spread them over")
    parser.add_argument(
        "--require", type=words, default=[], metavar="GATE,...",
        help="gates that must not be PENDING: build, resources, correctness, performance, or all",
    )  # fmt: skip
    _add_run_options(parser)
    args = parser.parse_args(argv)
    check_output_file(args.html, "--html")
    required = required_gates(args.require)
    if "evidence" in args.require:
        raise UsageError("--require evidence: no benchmark reads the machine code; `greenfast judge` does")
    request = _request(args, _command("kernel", *argv))
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
    return int(any(g.status == "FAIL" or (g.status == "PENDING" and g.gate in required) for g in outcome.record.gates))


def variant_of_environment(config: TaskConfig, environment: Mapping[str, str]) -> Variant:
    """Return the variant that the environment's toggles select. Raises UsageError for other than whole numbers."""
    toggles = {}
    for name in config.toggles:
        if name in environment:
            try:
                toggles[name] = int(environment[name])
            except ValueError:
                raise UsageError(
                    f"{name}={environment[name]!r}: allowed values are {config.toggles[name].values}"
                ) from None
    return config.toggle_variant(toggles)


def _comparison_parser(name: str, text: str) -> argparse.ArgumentParser:
    parser = make_parser(name, text)
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--shapes", type=words, metavar="A,B", help="shapes of the comparison (default: all, with errors too)"
    )
    which.add_argument("--grid", action="store_true", help="only the shapes that fill the GPU")
    parser.add_argument("--rounds", type=rounds, metavar="N", help="rounds per shape (default: by time)")
    _add_run_options(parser)
    return parser


def peers(argv: Sequence[str]) -> int:
    """Compare the Hopper kernel with libraries that compute the same."""
    args = _comparison_parser("peers", "Compare the Hopper kernel with libraries that compute the same.").parse_args(
        argv
    )
    return _compare(args, attention.peers, _command("peers", *argv), own_kernel=True)


def sdpa(argv: Sequence[str]) -> int:
    """Compare greenfast.sdpa with PyTorch's attention and others."""
    args = _comparison_parser("sdpa", "Compare greenfast.sdpa with PyTorch's attention and others.").parse_args(argv)
    return _compare(args, attention.operator, _command("sdpa", *argv))


def routing(argv: Sequence[str]) -> int:
    """Time greenfast.sdpa and PyTorch's attention on many shapes, for the rules of greenfast.use."""
    parser = _comparison_parser("routing", "Time attention on many shapes, for the rules of greenfast.use.")
    return _compare(parser.parse_args(argv), many_shapes.routing, _command("routing", *argv))


def serving(argv: Sequence[str]) -> int:
    """Compare attention over a paged FP8 cache, and appending to it, with FlashAttention-3."""
    parser = _comparison_parser("serving", "Compare attention over a paged FP8 cache, and appending to it.")
    parser.add_argument(
        "--cases", type=words, metavar="A,B", help="of decode, prefill, append and host (default: all of them)"
    )
    parser.add_argument("--quick", action="store_true", help="a third of the shapes, with fewer rounds")
    parser.add_argument(
        "--fa3-library", type=Path, metavar="FILE",
        help="FlashAttention-3 as vLLM ships it: its wheel's vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so",
    )  # fmt: skip
    args = parser.parse_args(argv)
    if args.fa3_library and not args.fa3_library.is_file():
        raise UsageError(f"--fa3-library {args.fa3_library}: no such file")
    if args.quick and args.rounds is None:
        args.rounds = _QUICK_ROUNDS
    library = str(args.fa3_library.resolve()) if args.fa3_library else ""
    comparison = paged.serving(args.cases or GROUPS, quick=args.quick, fa3_library=library)
    return _compare(args, lambda: comparison, _command("serving", *argv))


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


def _compare(
    args: argparse.Namespace, make: Callable[[], Comparison], command: str, *, own_kernel: bool = False
) -> int:
    """Compare backends; print each finished shape, and the tables. own_kernel: the task's kernel is a backend."""
    check_output_file(args.html, "--html")
    request, comparison = _request(args, command), make()
    config = request.task.config
    console = ComparisonConsole(comparison.versus, to_stderr=args.json)
    with console:
        outcome = compare(
            comparison, request, config.variant(config.defaults.candidate) if own_kernel else None, console,
            shapes=args.shapes, grid=args.grid, rounds=args.rounds,
        )  # fmt: skip
    if args.html:
        write_whole(args.html, benchmark_page(outcome.record, digest(outcome.folder)))
    if args.json:
        print(sealed_json(outcome.record), end="")
    else:
        _show(outcome)
    return 0


def parallel(argv: Sequence[str]) -> int:
    """Compare on several GPUs; print each row on one rank. Raises UsageError for unknown cases and backends."""
    parser = make_parser("parallel", "Compare attention of one sequence on several GPUs, in each process of torchrun.")
    parser.add_argument("--cases", type=words, metavar="A,B", help="sequences, such as 32k_causal (default: all)")
    parser.add_argument("--contenders", type=words, metavar="A,B", help="such as torch,ring,ulysses (default: all)")
    parser.add_argument("--rounds", type=rounds, default=7, metavar="N", help="rounds per case (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("results"), help="results folder (default: %(default)s)")
    args = parser.parse_args(argv)
    cases = {case.name: case for case in (*several_gpus.CASES, *several_gpus.CPU_CASES)}
    for option, names, allowed in (
        ("case", args.cases, cases), ("contender", args.contenders, PARALLEL_BACKENDS)
    ):  # fmt: skip
        for name in names or ():
            if name not in allowed:
                raise unknown(f"{option} of benchmarks parallel", name, allowed)
    several_gpus.run(
        args.out,
        cases=[cases[name] for name in args.cases or ()],
        backends=tuple(args.contenders or PARALLEL_BACKENDS),
        rounds=args.rounds,
    )
    return 0


def report(argv: Sequence[str]) -> int:
    """Print the reports of saved comparisons, or the schema of their records."""
    parser = make_parser("report", "Print the report of a saved comparison.")
    parser.add_argument("run", type=Path, nargs="*", help="a run's folder, or its record.json")
    parser.add_argument("--schema", action="store_true", help="print the JSON Schema of records")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="also draw the run's timings (.png or .svg)")
    parser.add_argument("--html", type=Path, metavar="FILE", help="also write the report as one HTML file")
    args = parser.parse_args(argv)
    if args.schema:
        print(json.dumps(record_schema(), indent=2))
        return 0
    if not args.run:
        raise UsageError("give a run's folder or its record.json, or --schema")
    if (args.plot or args.html) and len(args.run) > 1:
        raise UsageError(f"--{'plot draws' if args.plot else 'html is of'} one run; give one")
    check_output_file(args.html, "--html")
    for path, record in {path: read_benchmark(path) for path in args.run}.items():
        if args.html:
            write_whole(args.html, benchmark_page(record, digest(path)))
            print(args.html)
        else:
            if args.plot:
                _save_plot(record, args.plot)
            print(benchmark_report(record, plot=str(args.plot) if args.plot else None))
    return 0


def _save_plot(record: Benchmark, plot: Path) -> None:
    if plot.suffix not in (".png", ".svg"):
        raise UsageError(f"--plot {plot}: the name must end in .png or .svg")
    try:
        save_benchmark_plot(record, plot)
    except OSError as e:
        raise MachineError(f"{plot} cannot be written ({e.strerror})") from e


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

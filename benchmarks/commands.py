"""The commands of comparisons: ``peers``, ``sdpa``, ``routing``, ``serving`` and ``report``."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks import routing as many_shapes
from benchmarks import sdpa as attention
from benchmarks import serving as paged
from benchmarks.comparison import Comparison
from benchmarks.options import add_run_options, format_command, make_parser, make_run_request
from benchmarks.pictures import benchmark_page, save_benchmark_plot
from benchmarks.records import Benchmark, Row, SpeedupPair, read_benchmark, record_schema
from benchmarks.report import benchmark_report, ratios, summary
from benchmarks.runner import compare
from benchmarks.serving_cases import GROUPS
from greenfast.cli.console import GateConsole, show
from greenfast.cli.options import rounds, words
from greenfast.judge.pages import digest
from greenfast.judge.record_io import sealed_json
from greenfast.judge.store import check_output_file, write_whole
from greenfast.spec.errors import MachineError, UsageError

#: Rounds of each shape in a quick run.
_QUICK_ROUNDS = 10


def _comparison_parser(name: str, text: str) -> argparse.ArgumentParser:
    parser = make_parser(name, text)
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--shapes", type=words, metavar="A,B", help="shapes of the comparison (default: all, with errors too)"
    )
    which.add_argument("--grid", action="store_true", help="only the shapes that fill the GPU")
    parser.add_argument("--rounds", type=rounds, metavar="N", help="rounds per shape (default: by time)")
    add_run_options(parser)
    return parser


def peers(argv: Sequence[str]) -> int:
    """Compare the Hopper kernel with libraries that compute the same."""
    args = _comparison_parser("peers", "Compare the Hopper kernel with libraries that compute the same.").parse_args(
        argv
    )
    return _compare(args, attention.peers, format_command("peers", *argv), own_kernel=True)


def sdpa(argv: Sequence[str]) -> int:
    """Compare greenfast.sdpa with PyTorch's attention and others."""
    args = _comparison_parser("sdpa", "Compare greenfast.sdpa with PyTorch's attention and others.").parse_args(argv)
    return _compare(args, attention.operator, format_command("sdpa", *argv))


def routing(argv: Sequence[str]) -> int:
    """Time greenfast.sdpa and PyTorch's attention on many shapes, for the rules of greenfast.use."""
    parser = _comparison_parser("routing", "Time attention on many shapes, for the rules of greenfast.use.")
    return _compare(parser.parse_args(argv), many_shapes.routing, format_command("routing", *argv))


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
    return _compare(args, lambda: comparison, format_command("serving", *argv))


class ComparisonConsole(GateConsole):
    """A GateConsole that also prints each shape once it has been timed, as a run takes a minute."""

    def __init__(self, versus: Sequence[SpeedupPair], *, to_stderr: bool) -> None:
        super().__init__(to_stderr=to_stderr)
        self._versus = versus

    def cell(self, rows: Sequence[Row]) -> None:
        """Print a shape's times in microseconds and its ratios."""
        times = [f"{r.backend} {r.median_us:.1f}" for r in rows if r.median_us is not None]
        speedups = [f"; {v.title} {ratio:.3f}x" for v in self._versus for ratio in ratios(rows, v).values()]
        text = f"{rows[0].shape:18}{', '.join(times)} µs{''.join(speedups)}"
        self.line(text)


def _compare(
    args: argparse.Namespace, make: Callable[[], Comparison], command: str, *, own_kernel: bool = False
) -> int:
    """Compare backends; print each finished shape, and the summary. own_kernel: the task's kernel is a backend."""
    check_output_file(args.html, "--html")
    request, comparison = make_run_request(args, command), make()
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
        print(sealed_json(outcome.record, conclusions=True), end="")
    else:
        show(f"\n{summary(outcome.record)}\n\n{outcome.folder}")
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

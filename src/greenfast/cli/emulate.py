"""``greenfast emulate``."""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Mapping
from pathlib import Path

import msgspec
import numpy as np

from greenfast.cli.console import show, table
from greenfast.cli.progress import ProgressLine
from greenfast.emulator.annotated import annotate, annotated_page
from greenfast.emulator.arguments import read_arguments
from greenfast.emulator.kernel_run import (
    KernelReport,
    KernelRequest,
    LoadedKernel,
    describe_error,
    load_expected,
    load_kernel,
    run_kernel,
)
from greenfast.emulator.machine.faults import KernelFaultError
from greenfast.emulator.machine.observed import MAX_STEPS, Observe, Observed, format_step
from greenfast.emulator.watches import parse_watch
from greenfast.judge.report.facts import SHOWN
from greenfast.judge.store import check_output_file, check_writable, to_json, write_whole
from greenfast.spec.errors import GreenfastError
from greenfast.spec.facts import KernelCounts
from greenfast.spec.printable import printable
from greenfast.spec.problem import Array


def run(args: argparse.Namespace) -> int:
    """Run a kernel; 0 if no fault was found, else 1."""
    request = KernelRequest(
        source=args.file,
        kernel=args.kernel,
        grid=args.grid,
        block=args.block,
        smem=args.smem,
        arch=args.arch,
        seed=args.seed,
        orders=args.orders,
        defines=args.define,
        includes=args.include,
        formal=args.formal == "fail",
        observe=read_observe(args),
    )
    kernel = None
    try:
        arguments = read_arguments(args.arg, args.seed, args.buffer)
        expected = {name: load_expected(name, path, arguments) for name, path in dict(args.expect).items()}
        if args.save is not None:
            check_writable(args.save, "--save")
        check_observed_files(args)
        with ProgressLine(f"compiling {args.file}") as progress:
            kernel = load_kernel(request)
            progress.step = f"emulating {args.file}"
            report, outputs = run_kernel(request, kernel, arguments, expected, args.tolerance)
    except GreenfastError as e:
        report = _keep_observed(args, describe_error(request, e), kernel)
        if args.json:
            print(to_json(report), end="")
        else:
            if isinstance(e, KernelFaultError) and e.printed:  # the output before the fault helps to locate it
                print(printable(e.printed), end="")
            if kernel is not None:
                show_observed(args, report.observed, kernel.sources)
        raise
    report = _keep_observed(args, report, kernel)
    if args.save is not None:
        report = msgspec.structs.replace(report, saved=_save_outputs(args.save, outputs))
    if args.json:
        print(to_json(report), end="")
    else:
        _show(report)
        show_observed(args, report.observed, kernel.sources)
    if not request.formal:
        for fault in report.faults:
            if fault.level != "error":
                print(f"greenfast: {report.kernel}: {fault.level} finding: {fault.message}", file=sys.stderr)
    for failure in report.failures:
        print(f"greenfast: {report.kernel}: {failure}", file=sys.stderr)
    return int(bool(report.failures))


def _save_outputs(folder: Path, outputs: dict[str, Array]) -> list[str]:
    for name, data in outputs.items():
        content = io.BytesIO()
        np.save(content, data)
        write_whole(folder / f"{name}.npy", content.getvalue())
    return [str(folder / f"{name}.npy") for name in outputs]


def _keep_observed(args: argparse.Namespace, report: KernelReport, kernel: LoadedKernel | None) -> KernelReport:
    if report.observed is None or kernel is None:
        return report
    observed = write_observed(args, report.kernel, report.observed, kernel.sources)
    return msgspec.structs.replace(report, observed=observed)


def read_observe(args: argparse.Namespace) -> Observe:
    """Return the observations that the options of ``options.observe`` select."""
    return Observe(
        lines=args.lines or args.lines_html is not None,
        watch=args.watch,
        trace=args.trace_warp if args.trace is not None else None,
    )


def check_observed_files(args: argparse.Namespace) -> None:
    """Raise UsageError if a file of the observations cannot be written."""
    for option, path in (("--trace", args.trace), ("--lines-html", args.lines_html)):
        check_output_file(path, option)


def write_observed(args: argparse.Namespace, title: str, observed: Observed, sources: Mapping[str, str]) -> Observed:
    """Write the files of the observations. Return them without the trace."""
    if args.trace is not None:
        write_whole(args.trace, "".join(f"{format_step(step)}\n" for step in observed.trace).encode())
    if args.lines_html is not None:
        write_whole(args.lines_html, annotated_page(title, observed, sources).encode())
    return msgspec.structs.replace(observed, trace=[])


def show_observed(args: argparse.Namespace, observed: Observed | None, sources: Mapping[str, str]) -> None:
    """Print the observations."""
    if observed is None:
        return
    shown = observed if args.lines else msgspec.structs.replace(observed, lines=[])
    if text := annotate(shown, sources):
        show("")
        print(printable(text))
    reached = {step.line for step in observed.watched}
    for watch in map(parse_watch, args.watch):
        if watch.line not in reached:
            show(f"no thread reached line {watch.line} (--watch)")
    if observed.omitted:
        show(f"{observed.omitted} steps were not recorded: more than {MAX_STEPS}")


def _show(result: KernelReport) -> None:
    extents = ", ".join(
        f"{name} {','.join(map(str, e))}" for name, e in (("grid", result.grid), ("block", result.block))
    )
    runs = f"{result.orders} orders of the warps" if result.orders > 1 else "one order of the warps"
    show(f"{result.kernel}, {result.target}: {extents}; {runs}, {result.seconds:.1f} s")
    if result.resources:
        r = result.resources
        show(f"{r.registers} registers, {r.smem_bytes} bytes of shared memory, {r.spill_bytes} bytes spilled")
    if result.printed:
        show("\nprinted:")
        print(printable(result.printed), end="" if result.printed.endswith("\n") else "\n")
    show("")
    rows = [
        (
            o.name,
            o.dtype,
            ",".join(map(str, o.shape)),
            *("-" if value is None else f"{value:.6g}" for value in (o.min, o.max, o.mean)),
            str(o.nan),
            "filled before" if o.unwritten_bytes is None else f"{o.unwritten_bytes} of {o.bytes} bytes",
        )
        for o in result.outputs
    ]
    if rows:
        show(table(("output", "type", "shape", "min", "max", "mean", "NaN", "never written"), rows))
        if any(o.unwritten_bytes for o in result.outputs):
            show("(bytes that were never written read as 0xFF here: NaN, or -1)")
        show("")
    if result.counts is not None:
        show(table(("count", "", ""), count_rows(result.counts)))
    if result.saved:
        show("\n" + "\n".join(result.saved))


def count_rows(counts: KernelCounts) -> list[tuple[str, str, str]]:
    """Return one row per count of executed operations: name, number, and its kind or source line."""
    rows = [(title, str(getattr(counts, name)), "") for name, title in SHOWN.items()]
    rows += [("warp instructions", str(n), kind) for kind, n in counts.instructions.items()]
    return rows + [("bank conflicts", str(n), f"at {where}") for where, n in counts.bank_conflicts.items()]

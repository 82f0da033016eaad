"""``greenfast run``."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import runpy
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from greenfast.cli.console import show, table
from greenfast.cli.emulate import check_observed_files, read_observe, show_observed, write_observed
from greenfast.emulator.cuda.program import compile_program, run_program
from greenfast.emulator.findings import CountedFault, Findings, read_suppressions, to_sarif
from greenfast.emulator.kernel_run import DEFAULT_TARGET
from greenfast.emulator.machine.observed import Observed
from greenfast.emulator.ptx.names import demangle
from greenfast.judge.store import to_json, write_whole
from greenfast.spec.errors import GreenfastError, UsageError
from greenfast.spec.extras import require

#: A script's traceback omits the frames of runpy (Python's start of the script) and of this package.
_OWN = (runpy.__file__, str(Path(__file__).parents[1]))


class RunReport(msgspec.Struct, frozen=True, kw_only=True):
    """The report of a run. exit_code: of ``greenfast run``.

    launches: of a script, its launches (greenfast.emulator.triton.LaunchReport); of a CUDA program, its kernels.
    faults: of kernels, also if the script caught them, and refusals of the emulator. error: the exception that
    ended the script, empty if there was none. observed: the observations of all launches, without the trace.
    """

    script: str
    target: str
    seconds: float
    launches: list[Any]
    faults: list[CountedFault]
    skipped_benchmarks: int = 0
    error: str = ""
    observed: Observed | None = None
    exit_code: int


class KernelLaunches(msgspec.Struct, frozen=True, kw_only=True):
    """The launches of one kernel of a CUDA program."""

    kernel: str
    launches: int
    seconds: float


def run(args: argparse.Namespace) -> int:
    """Run a script or a program; 0 if it ended well and no fault was found, 1 for a fault, 3 for a refusal.

    A script that ends by sys.exit, and a program, gives its own code; a script that raises an exception gives 1.
    """
    _check(args)
    check_observed_files(args)
    findings = Findings(read_suppressions(args.suppressions) if args.suppressions else ())
    start = time.perf_counter()
    try:
        report = (_run_script if _is_python(args) else _run_program)(args, findings)
    finally:
        if args.sarif is not None:  # also if the run was interrupted
            write_whole(args.sarif, to_json(to_sarif(findings)))
    failing = findings.exit_code(args.formal == "fail")
    code = args.error_exitcode if failing and args.error_exitcode is not None else report.exit_code or failing
    seconds = round(time.perf_counter() - start, 3)
    report = msgspec.structs.replace(report, exit_code=code, seconds=seconds, faults=findings.all)
    sources = _read_sources(findings)
    if report.observed is not None:
        observed = write_observed(args, report.script, report.observed, sources)
        report = msgspec.structs.replace(report, observed=observed)
    if args.json:
        print(to_json(report), end="")
    else:
        _show(report, findings)
        show_observed(args, report.observed, sources)
    return code


def _is_python(args: argparse.Namespace) -> bool:
    return bool(args.module or args.script.suffix == ".py")


def _check(args: argparse.Namespace) -> None:
    if args.module:
        return
    if not args.script.is_file():
        raise UsageError(f"{args.script}: no such file; give a Python script, a CUDA source (.cu) or a program")
    if _is_python(args) and (args.nvcc or args.orders != 1 or args.watch):
        raise UsageError("--nvcc, --orders and --watch are for CUDA programs, not for Python scripts")


def _run_program(args: argparse.Namespace, findings: Findings) -> RunReport:
    """Run a CUDA program, compiled first if it is a source."""
    target = args.target or DEFAULT_TARGET
    with tempfile.TemporaryDirectory(prefix="greenfast-program-") as folder:
        program = args.script
        if program.suffix == ".cu":
            program = Path(folder) / args.script.stem
            compile_program(args.script, program, target, args.nvcc, args.watch)
        elif args.nvcc or args.target or args.watch:
            raise UsageError("--nvcc, --target and --watch are for a CUDA source; a program is compiled already")
        result = run_program(
            program,
            [a for n, a in enumerate(args.arguments) if n or a != "--"],
            findings,
            seed=args.seed,
            orders=args.orders,
            output=sys.stderr if args.json else None,
            observe=read_observe(args),
        )
    launches = [
        KernelLaunches(kernel=demangle(name), launches=count, seconds=round(result.seconds[name], 3))
        for name, count in result.launches.items()
    ]
    return RunReport(
        script=str(args.script),
        target=target,
        seconds=0.0,
        launches=launches,
        faults=[],
        observed=result.observed,
        exit_code=result.code,
    )


def _run_script(args: argparse.Namespace, findings: Findings) -> RunReport:
    """Run a Python script with its Triton kernels."""
    activate = importlib.import_module("greenfast.emulator.triton").activate  # only now, because it imports PyTorch
    target, error = args.target or "sm_90", ""
    with contextlib.ExitStack() as stack:
        if args.json:
            stack.enter_context(contextlib.redirect_stdout(sys.stderr))
        stack.enter_context(_own_arguments(args))
        activation = stack.enter_context(
            activate(
                target,
                cuda_tensors_as_cpu=True,
                autotune=args.autotune,
                benchmarks=args.benchmarks,
                formal=args.formal == "fail",
                seed=args.seed,
                observe=read_observe(args),
            )
        )
        try:
            code = _execute(args)
        except GreenfastError as e:
            code, error = e.exit_code, str(e)
            _print_traceback(e)
            if not any(fault.message in error for fault in activation.faults):  # no kernel's
                print(f"\ngreenfast: {error}", file=sys.stderr)
        except Exception as e:
            if isinstance(e, ModuleNotFoundError) and e.name == "triton":
                require("a script with Triton kernels", "triton")
            code, error = 1, f"{type(e).__name__}: {e}"
            _print_traceback(e)
    for launch in activation.launches:
        findings.extend(launch.kernel, launch.findings)
    findings.extend("", activation.faults)
    findings.files |= activation.files
    return RunReport(
        script=str(args.script),
        target=target,
        seconds=0.0,
        launches=[msgspec.structs.replace(launch, observed=None) for launch in activation.launches],
        faults=[],
        skipped_benchmarks=activation.skipped_benchmarks,
        error=error,
        observed=activation.observer.observed() if activation.observer is not None else None,
        exit_code=code,
    )


def _execute(args: argparse.Namespace) -> int:
    """Run the script as Python does. Return the exit code of a sys.exit, else 0."""
    try:
        if args.module:
            runpy.run_module(str(args.script), run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(str(args.script), run_name="__main__")
    except SystemExit as e:
        if e.code is None or isinstance(e.code, int):
            return int(e.code or 0)
        print(e.code, file=sys.stderr)
        return 1
    return 0


@contextlib.contextmanager
def _own_arguments(args: argparse.Namespace) -> Iterator[None]:
    """Set sys.argv and sys.path as Python does for a script."""
    argv, path = sys.argv, sys.path
    sys.argv = [str(args.script), *args.arguments]
    sys.path = [os.getcwd() if args.module else str(args.script.resolve().parent), *path]
    try:
        yield
    finally:
        sys.argv, sys.path = argv, path


def _print_traceback(error: Exception) -> None:
    """Print the frames of the script alone. Frames of runpy and of this package explain nothing."""
    hidden = _OWN if not isinstance(error, GreenfastError) else (*_OWN, *_library_folders())
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith((*hidden, "<frozen"))]
    print("Traceback (most recent call last):", file=sys.stderr)
    print("".join(traceback.format_list(frames)), end="", file=sys.stderr)
    if not isinstance(error, GreenfastError):  # a GreenfastError is in the report
        print("".join(traceback.format_exception_only(type(error), error)), end="", file=sys.stderr)


def _library_folders() -> tuple[str, ...]:
    """Return the folders of Triton and PyTorch, and Python's contextlib, through which a launch goes."""
    libraries = (sys.modules[name] for name in ("torch", "triton") if name in sys.modules)
    return (*(str(Path(str(library.__file__)).parent) for library in libraries), contextlib.__file__)


def _read_sources(findings: Findings) -> dict[str, str]:
    """Return the texts of the source files of all kernels that are here, by file name."""
    paths = {Path(name) for name in findings.files}
    return {path.name: path.read_text(errors="replace") for path in sorted(paths) if path.is_file()}


def _show(report: RunReport, findings: Findings) -> None:
    """Print the launches by kernel, and the faults."""
    rows: dict[str, tuple[int, float]] = {}
    for launch in report.launches:
        count, seconds = rows.get(launch.kernel, (0, 0.0))
        rows[launch.kernel] = count + getattr(launch, "launches", 1), seconds + launch.seconds
    total = sum(count for count, _ in rows.values())
    show(f"\n{report.script}, {report.target}: {total} launches, {report.seconds:.1f} s")
    if rows:
        show(table(("kernel", "launches", "seconds"), [(n, str(c), f"{s:.1f}") for n, (c, s) in rows.items()]))
    if report.skipped_benchmarks:
        show(f"{report.skipped_benchmarks} benchmarks were skipped: the emulator cannot measure time")
    for line in findings.describe():
        print(f"greenfast: {line}", file=sys.stderr)

"""``greenfast run``."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import runpy
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from greenfast.cli.console import show, table
from greenfast.emulator import Fault
from greenfast.judge.store import to_json
from greenfast.spec.errors import GreenfastError, UsageError

#: Files whose frames a script's traceback omits: Python's start of the script, and this package.
_OWN = (runpy.__file__, str(Path(__file__).parents[1]))


class RunReport(msgspec.Struct, frozen=True, kw_only=True):
    """The report of a script's run. exit_code: of ``greenfast run``. launches: greenfast.emulator.triton.LaunchReport.

    faults: of kernels, also those that the script caught, and what the emulator refused. error: the exception that
    ended the script, empty if there was none.
    """

    script: str
    target: str
    seconds: float
    launches: list[Any]
    faults: list[Fault]
    skipped_benchmarks: int
    error: str
    exit_code: int


def run(args: argparse.Namespace) -> int:
    """Run a script; 0 if it ended well and no fault was found, 1 for a fault, 3 for what the emulator lacks.

    A script that ends by sys.exit gives its own code, one that raises an exception gives 1.
    """
    _check(args)
    activate = importlib.import_module("greenfast.emulator.triton").activate  # only now, because it imports PyTorch
    start = time.perf_counter()
    error = ""
    with contextlib.ExitStack() as stack:
        if args.json:
            stack.enter_context(_output_to_stderr())
        stack.enter_context(_own_arguments(args))
        activation = stack.enter_context(
            activate(
                args.target,
                cuda_tensors_as_cpu=True,
                autotune=args.autotune,
                benchmarks=args.benchmarks,
                formal=args.formal == "fail",
                seed=args.seed,
            )
        )
        try:
            code = _execute(args)
        except GreenfastError as e:
            code, error = e.exit_code, str(e)
            _print_traceback(e)
        except Exception as e:
            code, error = 1, f"{type(e).__name__}: {e}"
            _print_traceback(e)
    faults = [*activation.faults, *(f for launch in activation.launches for f in launch.findings)]
    if not code and any(fault.level == "error" for fault in activation.faults):
        code = 1  # the script caught it
    elif not code and activation.faults:
        code = 3 if activation.faults[0].level == "unsupported" else 1
    report = RunReport(
        script=str(args.script),
        target=args.target,
        seconds=round(time.perf_counter() - start, 3),
        launches=activation.launches,
        faults=[fault for n, fault in enumerate(faults) if fault not in faults[:n]],
        skipped_benchmarks=activation.skipped_benchmarks,
        error=error,
        exit_code=code,
    )
    if args.json:
        print(to_json(report), end="")
    else:
        _show(report)
    return code


def _check(args: argparse.Namespace) -> None:
    if args.module:
        return
    if args.script.suffix != ".py":
        raise UsageError(f"{args.script}: give a Python script, or -m and a module's name")
    if not args.script.is_file():
        raise UsageError(f"{args.script}: no such file")


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


@contextlib.contextmanager
def _output_to_stderr() -> Iterator[None]:
    with contextlib.redirect_stdout(sys.stderr):
        yield


def _print_traceback(error: Exception) -> None:
    """Print the frames of the script alone: those of runpy and of this package explain nothing."""
    hidden = _OWN if not isinstance(error, GreenfastError) else (*_OWN, *_library_folders())
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith((*hidden, "<frozen"))]
    print("Traceback (most recent call last):", file=sys.stderr)
    print("".join(traceback.format_list(frames)), end="", file=sys.stderr)
    if not isinstance(error, GreenfastError):  # a GreenfastError is in the report
        print("".join(traceback.format_exception_only(type(error), error)), end="", file=sys.stderr)


def _library_folders() -> tuple[str, ...]:
    """Return the folders of Triton and PyTorch, and Python's contextlib, through which a launch goes."""
    libraries = (importlib.import_module(name) for name in ("torch", "triton"))
    return (*(str(Path(str(library.__file__)).parent) for library in libraries), contextlib.__file__)


def _show(report: RunReport) -> None:
    """Print the launches by kernel, and what was found."""
    show(f"\n{report.script}, {report.target}: {len(report.launches)} launches, {report.seconds:.1f} s")
    kernels = Counter(launch.kernel for launch in report.launches)
    if kernels:
        seconds = {name: sum(n.seconds for n in report.launches if n.kernel == name) for name in kernels}
        rows = [(name, str(count), f"{seconds[name]:.1f}") for name, count in kernels.items()]
        show(table(("kernel", "launches", "seconds"), rows))
    if report.skipped_benchmarks:
        show(f"{report.skipped_benchmarks} benchmarks were skipped: the emulator says nothing about time")
    for fault in report.faults:
        print(f"greenfast: {fault.level}: {fault.message}", file=sys.stderr)

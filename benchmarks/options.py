"""Options that several benchmarks share."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path

from greenfast.judge.request import Request, read_request
from greenfast.judge.task import load

#: The task with the problem of all comparisons.
_TASK = "fp8_attention"


def make_parser(name: str, text: str | None) -> argparse.ArgumentParser:
    """Return the parser of a benchmark. text: its description, unwrapped."""
    formatter = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(prog=f"python -m benchmarks {name}", description=text, formatter_class=formatter)


def add_run_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of every run with a record."""
    parser.add_argument(
        "--device", default="auto", help="auto, none, emulator, or a GPU's number (default: %(default)s)"
    )
    parser.add_argument("--timeout", type=float, default=60.0, metavar="S", help="seconds that a GPU step may take")
    parser.add_argument("--out", type=Path, default=Path("results"), help="results folder (default: %(default)s)")
    parser.add_argument("--html", type=Path, metavar="FILE", help="also write the report as one HTML file")
    parser.add_argument("--json", action="store_true", help="print the record as JSON instead of text")


def make_run_request(args: argparse.Namespace, command: str) -> Request:
    """Load the task and check the shared options. Raises UsageError or MachineError."""
    changes = {} if "task" in args else {"shapes": None}  # otherwise they are of the comparison
    return read_request(load(getattr(args, "task", _TASK)), args, command=command, **changes)


def format_command(*arguments: str) -> str:
    """Format the command line of a benchmark."""
    return shlex.join(["python", "-m", "benchmarks", *arguments])

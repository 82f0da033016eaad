"""The options ``--junit`` and ``--summary``: a run's results for a CI service."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

from greenfast.cli.page import check_file
from greenfast.judge.record_schema import Record
from greenfast.judge.report import formatting
from greenfast.judge.report.junit import junit, junit_error
from greenfast.judge.report.markdown import short_form
from greenfast.judge.store import write_whole
from greenfast.spec.errors import GreenfastError, MachineError, UsageError

Verb: TypeAlias = Callable[[argparse.Namespace], int]
_EXIT_INTERNAL = 3


def write_ci_outputs(verb: Verb) -> Verb:
    """Decorate a verb: check its output files before the run, and write an error without a verdict to them.

    A JUnit file of an earlier run is removed first, so that it is not taken for this run's result if this run is
    killed.
    """

    @functools.wraps(verb)
    def checked(args: argparse.Namespace) -> int:
        check_file(args.junit, "--junit")
        if args.junit is not None:
            args.junit.unlink(missing_ok=True)
        _append(args.summary, "")
        try:
            return verb(args)
        except (Exception, SystemExit) as e:
            code = e.exit_code if isinstance(e, GreenfastError) else _EXIT_INTERNAL
            subject = str(getattr(args, "solution", None) or args.task)
            error = str(e) or type(e).__name__
            if args.junit is not None:
                write_whole(args.junit, junit_error(subject, error, code))
            details = formatting.bullets([formatting.literal(error), f"Exit code: {code}"])
            _append(args.summary, f"**no verdict**: {formatting.code(subject)}\n\n{details}\n\n")
            raise

    return checked


def write_verdict(args: argparse.Namespace, record: Record, code: int) -> int:
    """Write the requested files of a judged run; return the exit code."""
    if args.junit is not None:
        write_whole(args.junit, junit(record, code))
    _append(args.summary, f"{short_form(record)}- Exit code: {code}\n\n")
    return code


def _append(file: Path | None, text: str) -> None:
    if file is None:
        return
    if file.is_dir():
        raise UsageError(f"--summary {file}: a folder; give the name of a file")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("a", encoding="utf-8") as stream:
            stream.write(text)
    except OSError as e:
        raise MachineError(f"--summary {file}: cannot be written ({e.strerror})") from e

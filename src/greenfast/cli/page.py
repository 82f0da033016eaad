"""The option ``--html``: a run as one HTML file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from greenfast.judge.gates.sides import BuiltSide
from greenfast.judge.pages import digest, record_page
from greenfast.judge.record_schema import AnyRecord
from greenfast.judge.store import check_writable, write_whole
from greenfast.judge.tasks import LoadedTask
from greenfast.spec.errors import UsageError


def check_page(file: Path | None) -> None:
    """Raise UsageError or MachineError before a run if its page cannot be written."""
    check_file(file, "--html")


def check_file(file: Path | None, option: str) -> None:
    """Raise UsageError or MachineError if an option's file cannot be written. None is allowed."""
    if file is None:
        return
    if file.exists() and not file.is_file():
        what = "a folder" if file.is_dir() else "no regular file"
        raise UsageError(f"{option} {file}: {what}; give the name of a file")
    check_writable(file.parent, option)


def write_page(
    file: Path | None,
    record: AnyRecord,
    run: Path,
    task: LoadedTask | None = None,
    built: Sequence[BuiltSide] = (),
) -> None:
    """Write the page of a record if requested.

    run: the record's file or folder. task: the record's; by default found by its name. built: the builds of a run that
    has just ended.
    """
    if file is None:
        return
    write_whole(file, record_page(record, digest(run), task, built))

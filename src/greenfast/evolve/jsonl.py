"""Read files with one JSON value per line."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

from greenfast.judge.strict_json import decode
from greenfast.spec.errors import UsageError
from greenfast.spec.files import read_file

T = TypeVar("T")
#: Largest file: a device or a pipe may never end.
_MAX_BYTES = 64 << 20


def read_lines(path: Path, kind: type[T], name: str) -> tuple[T, ...]:
    """Return the values of a file; empty lines are skipped.

    name: the noun for a line's value in messages. Raises UsageError with the file, the line and the fault.
    """
    try:
        data = read_file(path, _MAX_BYTES)
    except OSError as e:
        raise UsageError(
            f"{path}: cannot be read ({e.strerror}); allowed is a file of lines, each a {name} as JSON"
        ) from e
    lines = data.splitlines()
    values = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            values.append(decode(line, kind))
        except (ValueError, RecursionError) as e:
            raise UsageError(f"{path}, line {number}: no {name}: {e}") from e
    return tuple(values)

"""Files of one JSON value on each line."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

from greenfast.judge.strict_json import decode
from greenfast.spec.errors import UsageError
from greenfast.spec.files import read_file

T = TypeVar("T")
#: Of a file, at most; a device or a pipe may never end.
_MOST_BYTES = 64 << 20


def read_lines(path: Path, kind: type[T], name: str) -> tuple[T, ...]:
    """The values of a file, empty lines left out.

    name: what a line holds, for messages. Raises UsageError that names the file, the line and what is wrong with it.
    """
    try:
        data = read_file(path, _MOST_BYTES)
    except OSError as e:
        raise UsageError(
            f"{path}: cannot be read ({e.strerror}); allowed is a file of lines, each a {name} as JSON"
        ) from e
    lines = data.splitlines()
    found = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            found.append(decode(line, kind))
        except (ValueError, RecursionError) as e:
            raise UsageError(f"{path}, line {number}: no {name}: {e}") from e
    return tuple(found)

"""Files of one JSON value on each line."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import msgspec

from greenfast.spec.errors import UsageError

T = TypeVar("T")


def read_lines(path: Path, kind: type[T], name: str) -> tuple[T, ...]:
    """The values of a file, empty lines left out.

    name: what a line holds, for messages. Raises UsageError that names the file, the line and what is wrong with it.
    """
    try:
        lines = path.read_bytes().splitlines()
    except OSError as e:
        raise UsageError(f"{path}: cannot be read ({e.strerror})") from e
    found = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            found.append(msgspec.json.decode(line, type=kind))
        except (msgspec.DecodeError, ValueError, RecursionError) as e:
            raise UsageError(f"{path}, line {number}: no {name}: {e}") from e
    return tuple(found)

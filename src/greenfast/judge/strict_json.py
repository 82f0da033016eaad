"""JSON of files that others may have written: a name that stands twice in an object is an error.

Readers of JSON differ in which of the two they take, most without a word, so that a person and the judge could see
different things in one file.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec


def decode(text: bytes, kind: Any = Any) -> Any:
    """A JSON text as this type. Raises msgspec.DecodeError, of which ValidationError is one, and RecursionError."""
    found = msgspec.json.decode(text)
    json.loads(text, object_pairs_hook=once, parse_int=str, parse_float=str)  # of any length
    return found if kind is Any else msgspec.json.decode(text, type=kind)


def once(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
    """An object's pairs, as ``json`` hands them over. Raises msgspec.DecodeError, with the name that stands twice."""
    made = dict(pairs)
    if len(made) < len(pairs):
        seen: set[Any] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise msgspec.DecodeError(f"{twice!r} stands twice in one object; give each name once")
    return made
